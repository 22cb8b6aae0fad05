"""Slots of a preallocated cache that hold no key yet."""

from torch import Tensor
from transformers.cache_utils import Cache

from diffattn.ops.masks import additive_and_visible, blank_unseen


def without_unused_slots(
    cache: Cache, mask: object, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values with zeros where no query may look, whatever memory holds there.

    A static cache hands out all its slots. The mask hides those that are not in use, but a
    weight of zero times NaN is NaN.

    Args:
        cache: where `key` and `value` come from.
        mask: the attention mask; one of 4 axes says what is hidden.
        key: [B, G, S, W].
        value: [B, G, S, E].

    Returns:
        `key` and `value`; the same tensors for a cache that grows.
    """
    preallocated = isinstance(cache, Cache) and cache.is_compileable
    if not preallocated or not isinstance(mask, Tensor) or mask.dim() != 4:
        return key, value
    _, visible = additive_and_visible(mask)
    key, value = (blank_unseen(t.transpose(1, 2), visible).transpose(1, 2) for t in (key, value))
    return key, value
