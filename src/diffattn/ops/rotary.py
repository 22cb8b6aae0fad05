"""Rotary position embedding in both published styles."""

from typing import Literal

import torch
from torch import Tensor

RotaryStyle = Literal["half", "interleaved"]


def rotary_angles(
    positions: Tensor, dim: int, *, theta: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation of each position and channel pair.

        angle(p, i) = p theta^(-2 i / dim),  i = 0 .. dim/2 - 1

    Args:
        positions: [B, T] or [T] integer positions.
        dim: width of one query or key head; even.
        theta: base of the geometric series of frequencies.
        dtype: fp32 or fp64.

    Returns:
        cos and sin, each [..., T, dim / 2] in `dtype`.

    Raises:
        ValueError: `dim` is odd.

    Source: Su et al., arXiv 2104.09864, Eq. 15.
    """
    if dim % 2:
        raise ValueError(f"dim: rotary embedding needs an even head width, got {dim}")
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim
    angles = positions.to(dtype)[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, style: RotaryStyle = "half") -> Tensor:
    """Rotate queries or keys by their positions.

        (a, b) -> (a cos - b sin, b cos + a sin)  for each channel pair (a, b)

    Args:
        x: [B, T, H, D] queries or keys; signal and noise alike.
        cos: [B, T, D / 2] or [T, D / 2] from `rotary_angles`.
        sin: the same shape as `cos`.
        style: which channels form a pair: "half" joins i and i + D/2 (Hugging Face),
            "interleaved" joins 2i and 2i + 1 (the authors' code).

    Returns:
        [B, T, H, D] in the dtype of `x`; computed in fp32 or better.

    Raises:
        ValueError: `style` is unknown or D is not twice the width of `cos`.

    Source: Su et al., arXiv 2104.09864, Eq. 34.
    """
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(
            f"cos: expected width {x.shape[-1] // 2} for heads of {x.shape[-1]}, "
            f"got {cos.shape[-1]}"
        )
    if style == "half":
        a, b = x.chunk(2, dim=-1)
    elif style == "interleaved":
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        raise ValueError(f"style: expected 'half' or 'interleaved', got {style!r}")
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one rotation for all heads
    rotated = (a * cos - b * sin, b * cos + a * sin)
    if style == "half":
        return torch.cat(rotated, dim=-1).to(x.dtype)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x.dtype)
