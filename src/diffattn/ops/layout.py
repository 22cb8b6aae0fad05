"""Orders of signal and noise heads: ours, and the published ones they convert from.

Ours is the stripe: r signal heads, then the noise head that they share. For r = 1 this is the
adjacent pair of the authors' code, signal at 2i and noise at 2i + 1.
"""

import torch
from torch import Tensor


def join_stripes(signal: Tensor, noise: Tensor) -> Tensor:
    """Signal and noise heads in stripes along the head axis.

    Args:
        signal: [B, T, H, W].
        noise: [B, T, N, W]; N divides H.

    Returns:
        [B, T, H + N, W]: H/N signal heads, their noise head, and so on. A stripe never crosses a
        key group when the number of groups divides N.
    """
    ratio = signal.shape[2] // noise.shape[2]
    stripes = torch.cat((signal.unflatten(2, (-1, ratio)), noise.unsqueeze(3)), dim=3)
    return stripes.flatten(2, 3)


def split_stripes(heads: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Undo `join_stripes`.

    Args:
        heads: [B, T, H + N, W] in stripes.
        ratio: r = H/N signal heads to one noise head.

    Returns:
        Signal [B, T, H, W] and noise [B, T, N, W].
    """
    # one split, whose gradient is one concatenation
    signal, noise = heads.unflatten(2, (-1, ratio + 1)).split((ratio, 1), dim=3)
    return signal.flatten(2, 3), noise.flatten(2, 3)


def half_split_to_adjacent(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder projection rows whose head i pairs with head i + half, as in DiffLlama.

    Args:
        rows: [2 H head_dim, ...] weight (or bias), first all signal heads, then all noise heads.
        head_dim: width of one head.

    Returns:
        The same rows with signal head i at 2i and its noise head at 2i + 1.

    Raises:
        ValueError: `rows` does not hold an even number of heads.

    Source: Hugging Face DiffLlama against the authors' flash files (microsoft/unilm).
    """
    _check_rows(rows, 2 * head_dim)
    return rows.unflatten(0, (2, -1, head_dim)).transpose(0, 1).flatten(0, 2)


def adjacent_to_half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Undo `half_split_to_adjacent`."""
    _check_rows(rows, 2 * head_dim)
    return rows.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).flatten(0, 2)


def interleaved_to_half(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of a query or key projection from interleaved to half rotary style.

    Args:
        rows: [heads head_dim, ...] weight (or bias) for rotation of channels (2i, 2i + 1).
        head_dim: width of one head; even.

    Returns:
        The same rows for rotation of channels (i, i + head_dim/2): scores are unchanged.

    Raises:
        ValueError: `rows` is not a whole number of heads, or `head_dim` is odd.
    """
    _check_rows(rows, head_dim, even=True)
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def half_to_interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Undo `interleaved_to_half`."""
    _check_rows(rows, head_dim, even=True)
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _check_rows(rows: Tensor, multiple: int, *, even: bool = False) -> None:
    if even and multiple % 2:
        raise ValueError(f"head_dim: expected an even width, got {multiple}")
    if rows.shape[0] % multiple:
        raise ValueError(f"rows: expected a multiple of {multiple} rows, got {rows.shape[0]}")
