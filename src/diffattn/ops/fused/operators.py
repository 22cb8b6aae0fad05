"""The kernel as operators of torch, which autograd, compile and export know."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from diffattn.ops.fused.library import library
from diffattn.ops.registry import differentiate, operator

KINDS = (torch.float32, torch.float64, torch.bfloat16)

_Listed = list[tuple[int, Tensor | None]]
"""strides that the kernel wants of a tensor, and the tensor"""


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    mask: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
) -> _Listed:
    rows = [(3, tensor) for tensor in (q, k, v, q_noise, k_noise)]
    return [*rows, (4, mask), (3, lam), (0, sink), (0, sink_noise)]


def _run(name: str, listed: _Listed, sizes: list[int], scale: float) -> None:
    strides: list[int] = []
    pointers: list[int] = []
    for count, tensor in listed:
        if tensor is None:
            strides += [0] * count
            pointers.append(0)
        else:
            strides += tensor.stride()[:count]
            pointers.append(tensor.data_ptr())
    first = listed[0][1]
    assert first is not None
    getattr(library(), name)(
        KINDS.index(first.dtype),
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(strides))(*strides),
        scale,
    )


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, q_noise: Tensor | None, causal: bool, window: int
) -> list[int]:
    noise_heads = 0 if q_noise is None else q_noise.shape[2]
    shape = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], noise_heads, k.shape[2]]
    return [*shape, q.shape[3], v.shape[3], int(causal), window]


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    mask: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, H, E], log-sum-exps of the signal maps [B, H, T] and noise maps [B, N, T]."""
    out, lse, lse_noise = _forward_shapes(q, v, q_noise)
    listed = _inputs(q, k, v, q_noise, k_noise, lam, mask, sink, sink_noise)
    listed += [(3, out), (0, lse), (0, lse_noise)]
    sizes = _sizes(q, k, v, q_noise, causal, window)
    _run("diff_attention_forward", listed, sizes, scale)
    return out, lse, lse_noise


def _forward_shapes(q: Tensor, v: Tensor, q_noise: Tensor | None) -> tuple[Tensor, ...]:
    batch, length, heads = q.shape[:3]
    noise_heads = 0 if q_noise is None else q_noise.shape[2]
    work = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty(batch, length, heads, v.shape[3]),
        q.new_empty(batch, heads, length, dtype=work),
        q.new_empty(batch, noise_heads, length, dtype=work),
    )


fused_forward = operator(
    "fused_forward",
    run_forward,
    device="cpu",
    shapes=lambda q, k, v, q_noise, *rest: _forward_shapes(q, v, q_noise),
)


def _run_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    mask: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
    lse: Tensor,
    lse_noise: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_noise, k_noise, and sum_j P dP of both maps, [B, H, T]."""
    found = _backward_shapes(q, k, v, q_noise, k_noise)
    *rows, delta, delta_noise = found
    listed = _inputs(q, k, v, q_noise, k_noise, lam, mask, sink, sink_noise)
    listed += [(3, d_out), (0, lse), (0, lse_noise)]
    listed += [*((3, row) for row in rows), (0, delta), (0, delta_noise)]
    sizes = _sizes(q, k, v, q_noise, causal, window)
    _run("diff_attention_backward", listed, sizes, scale)
    return found


def _backward_shapes(
    q: Tensor, k: Tensor, v: Tensor, q_noise: Tensor | None, k_noise: Tensor | None
) -> Any:
    batch, length, heads = q.shape[:3]
    work, nothing = torch.promote_types(q.dtype, torch.float32), (batch, 0, 1, q.shape[3])
    return (
        *(tensor.new_empty(tensor.shape) for tensor in (q, k, v)),
        q.new_empty(nothing if q_noise is None else q_noise.shape),
        q.new_empty(nothing if k_noise is None else k_noise.shape),
        q.new_empty(batch, heads, length, dtype=work),
        q.new_empty(batch, 0 if q_noise is None else heads, length, dtype=work),
    )


fused_backward = operator(
    "fused_backward",
    _run_backward,
    device="cpu",
    shapes=lambda d_out, q, k, v, q_noise, k_noise, *rest: _backward_shapes(
        q, k, v, q_noise, k_noise
    ),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, *of_sums: Any) -> tuple[Tensor | None, ...]:
    """The rule of autograd; nothing differentiates the log-sum-exps.

    d lam = -sum_j P2 dP;  d sink = -p_sink sum_j P1 dP,  p_sink = exp(sink - lse), and for the
    noise map with the factor -lam.
    """
    if d_out is None:
        return (None,) * 12
    *tensors, lse, lse_noise = ctx.saved_tensors
    q_noise, k_noise, lam, sink, sink_noise = (tensors[n] for n in (3, 4, 5, 7, 8))
    *rows, delta, delta_noise = fused_backward(
        d_out.contiguous(), *tensors, lse, lse_noise, ctx.causal, ctx.window, ctx.scale
    )
    d_lam = None if lam is None else -delta_noise.transpose(1, 2)
    d_sink = d_sink_noise = None
    if sink is not None:
        d_sink = -((sink[:, None] - lse).exp() * delta).sum((0, 2))
    if sink_noise is not None and lam is not None:
        weighed = (lam.transpose(1, 2) * delta_noise).unflatten(1, (lse_noise.shape[1], -1)).sum(2)
        d_sink_noise = ((sink_noise[:, None] - lse_noise).exp() * weighed).sum((0, 2))
    d_q, d_k, d_v, d_q_noise, d_k_noise = rows
    return (
        *(d_q, d_k, d_v, None if q_noise is None else d_q_noise),
        *(None if k_noise is None else d_k_noise, d_lam, None, d_sink, d_sink_noise),
        *(None, None, None),
    )


differentiate("fused_forward", _differentiate, _keep)
