"""The sides of a comparison: a form of attention in an implementation, with its operands."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.ops import IMPLEMENTATIONS, diff_attention, softmax_attention

FORMS = ("softmax", "v1", "v2")
TORCH = "torch"
"""in place of an implementation: softmax attention by torch's own function, the base"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "forward + backward")


class Side(NamedTuple):
    """A form of attention in an implementation."""

    form: str
    """one of FORMS"""
    impl: str
    """TORCH, "auto", or one of IMPLEMENTATIONS"""

    @property
    def name(self) -> str:
        """As tables print it."""
        return f"{self.form}, {self.impl}"


BASE = Side("softmax", TORCH)


class Shape(NamedTuple):
    """Sizes of one call."""

    batch: int
    heads: int
    """output heads"""
    groups: int
    """key heads (of each map)"""
    queries: int
    keys: int
    width: int
    """of a query or key head"""


def of_transformer(form: str, batch: int, pairs: int, tokens: int, width: int) -> Shape:
    """What a form computes in place of a Transformer's 2 `pairs` heads of `width`."""
    heads = pairs if form == "v1" else 2 * pairs
    return Shape(batch, heads, heads, tokens, tokens, width)


def sides_of(forms: tuple[str, ...], impls: tuple[str, ...]) -> list[Side]:
    """Every form in every implementation; "all" means all that there are."""
    names = IMPLEMENTATIONS if impls == ("all",) else impls
    return [Side(form, impl) for form in forms for impl in names]


def operands(
    side: Side, shape: Shape, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Normal leaves in the order of the operator's arguments, lam last and in fp32."""
    batch, heads, groups, queries, keys, width = shape

    def leaf(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)

    def fp32(value: Tensor) -> Tensor:
        return value.to(device).requires_grad_()

    if side.impl == TORCH:  # in the order of axes that torch's function takes
        return leaf(batch, heads, queries, width), *(leaf(batch, groups, keys, width) for _ in "kv")
    q, k = leaf(batch, queries, heads, width), leaf(batch, keys, groups, width)
    v = leaf(batch, keys, groups, 2 * width if side.form == "v1" else width)
    if side.form == "softmax":
        return q, k, v
    q_noise = leaf(batch, queries, heads, width)
    if side.form == "v2":
        return q, k, v, q_noise, fp32(torch.rand(batch, queries, heads))
    return q, k, v, q_noise, leaf(batch, keys, groups, width), fp32(torch.tensor(0.5))


def attend(side: Side, tensors: tuple[Tensor, ...]) -> Tensor:
    """The causal output of a side."""
    if side.impl == TORCH:
        q, k, v = tensors
        causal = q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    impl: Any = side.impl
    if side.form == "softmax":
        return softmax_attention(*tensors, causal=True, impl=impl)
    *rows, lam = tensors
    return diff_attention(*rows, lam=lam, causal=True, impl=impl)


def one_pass(side: Side, tensors: tuple[Tensor, ...], kind: str) -> Callable[[], None]:
    """A function that runs a pass, one of PASSES, and returns when the device is done."""
    q, _, v = tensors[:3]
    d_out = None if kind == PASSES[0] else q.new_empty(*q.shape[:-1], v.shape[-1]).normal_()
    on_gpu = q.device.type == "cuda"

    def run() -> None:
        if d_out is None:
            with torch.no_grad():
                attend(side, tensors)
        else:
            torch.autograd.grad(attend(side, tensors), tensors, d_out)
        if on_gpu:
            torch.cuda.synchronize()

    return run
