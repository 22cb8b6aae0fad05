"""The attention mask of each type of layer, from what the caller gives."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.engines import ENGINES
from diffattn.models.positions import separate_documents
from diffattn.ops.masks import hidden_entries

MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def layer_masks(
    config: DiffTransformerConfig,
    x: Tensor,
    attention_mask: Tensor | dict[str, Any] | None,
    cache: Cache | None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    training: bool = False,
) -> dict[str, Any]:
    """Masks by layer type, in the form that the attention implementation takes.

    Args:
        config: of the model.
        x: [B, T, hidden_size] input.
        attention_mask: [B, S] with 0 for padding; or what is visible (bool) or added to the scores
            (float), [B or 1, 1 or query heads, T, S], for all layers or by layer type.
        cache: keys and values of earlier steps.
        position_ids: [B or 1, T]; see `separate_documents`.
        cu_seqlens: [documents + 1]; see there.
        training: whether gradients will train the model.

    Returns:
        One mask for each of the configuration's layer types.

    Raises:
        ValueError: the mask has another form, or the implementation would get none.
    """
    types = dict.fromkeys(config.layer_types or [])
    name = config._attn_implementation
    prepared: dict[str, Any] = {}
    padding = None
    if isinstance(attention_mask, dict):  # None in it says nothing
        prepared = attention_mask
    elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        padding = attention_mask
    elif attention_mask is not None:
        prepared = dict.fromkeys(types, attention_mask)
    masks = {kind: _prepared(prepared.get(kind), name, x.shape[0]) for kind in types}
    missing = [kind for kind in types if masks[kind] is None]
    if missing:
        _check_mask_function(name, padding, cache, training)
        documents = separate_documents(position_ids, padding, cache, cu_seqlens)
        for kind in missing:
            masks[kind] = MASKS[kind](config, x, padding, cache, None, and_mask_function=documents)
    return masks


def _check_mask_function(
    name: str | None, padding: Tensor | None, cache: Cache | None, training: bool
) -> None:
    """Refuse attention that would not hear of causal order or padding.

    transformers hands no mask at all to an implementation that has no mask function. Engines do
    without, in their own causal order, but neither train nor pad; continuous batching, whose cache
    is its own, says what is visible by cumulative lengths. Training on the future looks wonderful.
    """
    if name in ALL_MASK_ATTENTION_FUNCTIONS or not (cache is None or isinstance(cache, Cache)):
        return
    if name not in ENGINES or training or (padding is not None and not padding.all()):
        raise ValueError(
            f"attn_implementation={name!r} has no mask function, so it would get no causal order, "
            "window or padding: register one with transformers.AttentionMaskInterface"
        )


def _prepared(mask: Any, name: str | None, batch: int) -> Any:
    """A mask of four axes with -inf where nothing may be seen.

    Kernels take a lowest finite number, which is transformers' sign for it, at its word: a row of
    it alone becomes the average of all values instead of zeros.
    """
    if not isinstance(mask, Tensor):  # None, or a block mask
        return mask
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            "attention_mask: expected 2 axes, or 4 axes of bool or float, got "
            f"{tuple(mask.shape)} of {mask.dtype}"
        )
    if name == "flex_attention":  # reads its first head, and adds what it reads
        if mask.shape[1] != 1:
            raise ValueError(
                "attention_mask: attn_implementation='flex_attention' reads one mask for all "
                f"heads, got {mask.shape[1]}: ask for 'eager' or 'sdpa'"
            )
        mask = mask.expand(batch, -1, -1, -1)
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    if mask.is_floating_point():
        mask = mask.masked_fill(hidden_entries(mask), -torch.inf)
    return mask
