"""Masks of common patterns: padding, packed documents, prefixes, and the ALiBi bias."""

import math
from typing import Literal

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, size: int, *, side: Literal["left", "right"] = "right") -> Tensor:
    """Keys that are tokens, not padding.

    Args:
        lengths: [B] integer number of tokens of each row.
        size: S, tokens and padding together.
        side: where the padding stands.

    Returns:
        [B, 1, 1, S] bool, True = visible.

    Raises:
        ValueError: `side` is unknown.

    Example:
        >>> padding_mask(torch.tensor([2, 3]), 3)[:, 0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    place = torch.arange(size, device=lengths.device)
    if side == "right":
        visible = place < lengths[:, None]
    elif side == "left":
        visible = place >= size - lengths[:, None]
    else:
        raise ValueError(f"side: expected 'left' or 'right', got {side!r}")
    return visible[:, None, None]


def documents_of_lengths(cu_seqlens: Tensor) -> Tensor:
    """Number of the document of each token, from cumulative lengths.

    Args:
        cu_seqlens: [documents + 1] integers from 0 to the number of tokens T.

    Returns:
        [1, T] document numbers from 0.

    Raises:
        ValueError: `cu_seqlens` does not start at 0 or does not grow.

    Example:
        >>> documents_of_lengths(torch.tensor([0, 3, 5])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    sizes = cu_seqlens.diff()
    if cu_seqlens.dim() != 1 or cu_seqlens[0] != 0 or (sizes < 0).any():
        raise ValueError(
            f"cu_seqlens: expected lengths summed up from 0, got {cu_seqlens.tolist()}"
        )
    numbers = torch.arange(sizes.numel(), device=cu_seqlens.device)
    return numbers.repeat_interleave(sizes)[None]


def documents_of_positions(position_ids: Tensor) -> Tensor:
    """Number of the document of each token, where positions that do not count on start anew.

    Args:
        position_ids: [B, T] integer positions.

    Returns:
        [B, T] document numbers from 0.

    Example:
        >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    starts = position_ids.diff(dim=-1) != 1
    return torch.nn.functional.pad(starts.cumsum(-1), (1, 0))


def document_mask(documents: Tensor) -> Tensor:
    """Tokens of the same document; causal order is said beside it.

    Args:
        documents: [B, T] document numbers.

    Returns:
        [B, 1, T, T] bool, True = visible; memory grows with T squared.

    Example:
        >>> document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def prefix_mask(prefix: Tensor, size: int) -> Tensor:
    """A prefix that is seen from everywhere, causal order behind it; for causal=False.

    Args:
        prefix: [B] integer length of each row's prefix.
        size: T, tokens of a row.

    Returns:
        [B, 1, T, T] bool, True = visible.

    Example:
        >>> prefix_mask(torch.tensor([2]), 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]

    Source: Raffel et al., arXiv 1910.10683, section 3.2.1.
    """
    place = torch.arange(size, device=prefix.device)
    causal = place[:, None] >= place[None, :]
    return (causal | (place < prefix[:, None, None]))[:, None]


def alibi_bias(
    num_heads: int, queries: int, keys: int, *, device: torch.device | None = None
) -> Tensor:
    """Attention with linear biases: a penalty that grows with distance.

        bias(h, t, s) = -m_h |t + S - T - s|,  m_h = 2^(-8 (h + 1) / H)

    For H that is no power of two: the slopes of the largest power below, then every other slope
    of twice that power.

    Args:
        num_heads: H, signal heads; a noise head of its own gets its signal head's slope.
        queries: T.
        keys: S; the last query stands at the last key.
        device: where the bias is made.

    Returns:
        [1, H, T, S] fp32, to be added to the scores.

    Example:
        >>> alibi_bias(2, 1, 3)[0, :, 0].tolist()
        [[-0.125, -0.0625, -0.0], [-0.0078125, -0.00390625, -0.0]]

    Source: Press et al., arXiv 2108.12409, section 3.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    position = torch.arange(queries, device=device) + keys - queries
    distance = (position[:, None] - torch.arange(keys, device=device)[None, :]).abs()
    return -torch.tensor(slopes[:num_heads], device=device)[None, :, None, None] * distance
