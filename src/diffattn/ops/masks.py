"""Which keys a query sees: causal order, windows, user masks."""

import torch
from torch import Tensor

# of the blocks in which a mask is looked at: far below the mask itself
_ROWS = 256

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


def reach(rows: slice, keys: int, *, offset: int, causal: bool, window: int | None) -> slice:
    """The keys that any of these rows can see; at least one, so that no kernel meets a void."""
    stop = keys
    if causal:
        stop = min(keys, rows.stop + offset)
    elif window is not None:
        stop = min(keys, rows.stop + offset + window - 1)
    stop = max(stop, 1)
    start = 0 if window is None else max(0, rows.start + offset - window + 1)
    return slice(min(start, stop - 1), stop)


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


def added_and_used(
    mask: Tensor | None, length: int, keys: int, *, causal: bool, window: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """A user's mask as numbers to add, and the keys that count at all.

    Args:
        mask: bool or float, as in `additive_and_visible`.
        length: T.
        keys: S.
        causal: see `band`.
        window: see `band`.

    Returns:
        (added, used): what is added to the scores, -inf where the mask hides, [B, H, T, S] with
        axes of size 1 where nothing differs; and the keys that some query sees by mask and by
        position, bool [B or 1, H or 1, 1, S or 1]. Both None without a mask.
    """
    bias, seen = additive_and_visible(mask)
    if seen is None:
        return None, None
    seen = four_axes(seen)
    added = seen.new_zeros((), dtype=torch.float32) if bias is None else four_axes(bias)
    added = added.masked_fill(~seen, float("-inf"))
    if not causal and window is None:
        return added, seen.any(dim=-2, keepdim=True)
    used = seen.new_zeros(*seen.shape[:2], 1, keys)
    columns = slice(0, keys)
    for start in range(0, length, _ROWS):
        rows = slice(start, min(start + _ROWS, length))
        near = band(
            rows, columns, offset=keys - length, causal=causal, window=window, device=seen.device
        )
        now = both(block_of(seen, rows, columns), near)
        assert now is not None
        used |= now.any(dim=-2, keepdim=True)
    return added, used
