"""How wrong a side is beside the definition in fp64, in units of torch's own error."""

import torch
from torch import Tensor

from diffattn.bench.sides import BASE, TORCH, Shape, Side, attend, operands

LIMIT = 4.0
"""a side further from the definition than so many times torch's own error is wrong (our choice)"""
_TOKENS = 16, 160  # at least, at most


def error_ratio(side: Side, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> float:
    """Error of a side over that of torch's softmax attention of the same width.

    Both are distances to the definition in fp64 over the size of what is right, the largest of
    the output's and of every gradient's, at no more than 160 tokens.

    Args:
        side: to be checked.
        shape: its sizes; torch's error is that of as many queries as keys.
        dtype: of its operands.
        device: where it runs.

    Raises:
        NotImplementedError: the implementation cannot serve it.
        ValueError: the implementation does not serve its form.
    """
    least, most = _TOKENS
    square = shape._replace(**dict.fromkeys(("queries", "keys"), min(max(shape.keys, least), most)))
    short = square._replace(queries=min(shape.queries, square.queries))
    torch.manual_seed(0)
    return _error(side, short, dtype, device) / _error(BASE, square, dtype, device)


def _error(side: Side, shape: Shape, dtype: torch.dtype, device: str) -> float:
    tensors = operands(side, shape, dtype, device)
    out = attend(side, tensors)
    d_out = out.detach()  # of half the squared output: nothing cancels in the gradient of lam
    found = (out, *torch.autograd.grad(out, tensors, d_out))
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in tensors)
    right = _definition(side, exact)
    wanted = (right, *torch.autograd.grad(right, exact, d_out.double()))
    return max(
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)
    )


def _definition(side: Side, tensors: tuple[Tensor, ...]) -> Tensor:
    reference = Side(side.form, "reference")
    if side.impl != TORCH:
        return attend(reference, tensors)
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    return attend(reference, (q, k, v)).transpose(1, 2)
