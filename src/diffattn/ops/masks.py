"""Which keys a query sees: causal order, windows, user masks."""

import torch
from torch import Tensor

# what libraries write in a float mask for "hidden", cast to another dtype or not
LOWEST = tuple(
    torch.finfo(dtype).min
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)


def hidden_entries(mask: Tensor) -> Tensor:
    """Entries of a float mask that hide a key.

    They are -inf and the lowest finite number of fp16, bf16, fp32 or fp64, whichever of them the
    mask was made in; any other number, however low, is added to the scores.

    Args:
        mask: float, any shape.

    Returns:
        Bool of the same shape, True = hidden; NaN is not, and shows.
    """
    own = torch.finfo(mask.dtype).min
    hidden = mask <= own
    for lowest in LOWEST:
        if lowest > own:
            hidden = hidden | (mask == lowest)
    return hidden


def additive_and_visible(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a user's mask into what is added to the scores and what may be seen.

    Args:
        mask: bool (True = visible) or float (added to the scores; what
            `hidden_entries` finds is invisible), broadcastable to [B, H, T, S].

    Returns:
        (bias, visible), each None where there is nothing to say. Invisible entries of `bias`
        are 0, so that no infinity meets another.
    """
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return None, mask
    visible = ~hidden_entries(mask)
    return mask.masked_fill(~visible, 0.0), visible


def band(
    rows: slice,
    columns: slice,
    *,
    offset: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> Tensor | None:
    """Visibility by position for a block of the score matrix.

    Query row i stands at position i + offset, where offset = S - T puts the last query at the
    last key (bottom-right alignment). Causal: keys up to that position. Window w: keys less than
    w positions away, the query's own included.

    Args:
        rows: the block's query indices; a slice, for a range would fix a symbolic length.
        columns: the block's key indices.
        offset: S - T.
        causal: whether later keys are hidden.
        window: w, or None for no limit.
        device: where the mask is made.

    Returns:
        [rows, columns] bool, True = visible; None when everything is.
    """
    if not causal and window is None:
        return None
    position = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
    key = torch.arange(columns.start, columns.stop, device=device)[None, :]
    distance = position - key
    if window is None:
        return distance >= 0
    if causal:
        return (distance >= 0) & (distance < window)
    return distance.abs() < window


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Visible in `a` and in `b`, where None sees everything."""
    if a is None:
        return b
    return a if b is None else a & b


def four_axes(mask: Tensor) -> Tensor:
    """A mask that is broadcastable to [B, H, T, S], with all four axes."""
    return mask.view((1,) * (4 - mask.dim()) + mask.shape)


def block_of(mask: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    """The part of a mask for a block of the score matrix; axes of size 1 stay."""
    if mask is None:
        return None
    mask = mask[..., columns] if mask.shape[-1] > 1 else mask
    return mask[..., rows, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask


def blank_unseen(keys: Tensor, visible: Tensor | None) -> Tensor:
    """Zeros in place of keys (or values) that no query sees, whatever memory holds there.

    A weight of exact zero times NaN is NaN; slots of a cache that are not yet in use may hold it.

    Args:
        keys: [B, S, G, W] keys or values.
        visible: bool, broadcastable to [B, H, T, S], or None for everything.

    Returns:
        [B, S, G, W]; `keys` itself where everything is visible.
    """
    if visible is None:
        return keys
    seen = four_axes(visible).any(dim=-2).any(dim=-2)
    return keys.masked_fill(~seen[:, :, None, None], 0.0)
