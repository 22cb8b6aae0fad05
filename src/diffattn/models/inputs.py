"""What a model's forward pass takes; every refusal is one line that names the argument."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache


def check_rows(input_ids: Tensor | None, inputs_embeds: Tensor | None, width: int) -> None:
    """Refuse anything but one of both, of the right axes, with at least one token.

    Args:
        input_ids: [B, T].
        inputs_embeds: [B, T, width].
        width: of the model.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids: give exactly one of input_ids and inputs_embeds")
    if torch.compiler.is_compiling():  # shapes are symbols there
        return
    if input_ids is not None:
        name, shape, axes = "input_ids", tuple(input_ids.shape), "[batch, time]"
        fits = len(shape) == 2
    else:
        assert inputs_embeds is not None
        name, shape, axes = "inputs_embeds", tuple(inputs_embeds.shape), f"[batch, time, {width}]"
        fits = len(shape) == 3 and shape[2] == width
    if not fits or 0 in shape:
        raise ValueError(f"{name}: expected {axes} of at least one token, got shape {shape}")


def check_beside(
    batch: int,
    length: int,
    *,
    attention_mask: object,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: object,
    layer_types: Iterable[str],
) -> None:
    """Refuse masks, positions and lengths that do not fit the tokens.

    Args:
        batch: B of the tokens.
        length: T of the tokens.
        attention_mask: see `DiffTransformerModel.forward`; so for the next three.
        position_ids: as there.
        cu_seqlens: `cu_seq_lens_q` there.
        cache: as there; not transformers' own in continuous batching, which pads as it likes.
        layer_types: of the configuration.
    """
    if torch.compiler.is_compiling() or not (cache is None or isinstance(cache, Cache)):
        return
    seen = 0 if cache is None else cache.get_seq_length()
    if isinstance(attention_mask, dict):
        missing = [kind for kind in dict.fromkeys(layer_types) if kind not in attention_mask]
        if missing:
            raise ValueError(
                f"attention_mask: expected a mask for each of {missing}, got those of "
                f"{list(attention_mask)}"
            )
    elif isinstance(attention_mask, Tensor):
        _check_mask(attention_mask, batch, length, seen if isinstance(seen, int) else None)
    elif attention_mask is not None and not isinstance(attention_mask, BlockMask):
        raise ValueError(
            "attention_mask: expected a tensor, or a dictionary of masks by layer type, got "
            f"{type(attention_mask).__name__}"
        )
    if position_ids is not None:
        shape = tuple(position_ids.shape)
        if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != length:
            raise ValueError(
                f"position_ids: expected [{batch} or 1, {length}] as the tokens, got shape {shape}"
            )
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens[-1:].tolist() != [length]):
        raise ValueError(
            f"cu_seq_lens_q: expected lengths summed up from 0 to {length} tokens, got "
            f"{cu_seqlens.tolist()}"
        )


def _check_mask(mask: Tensor, batch: int, length: int, seen: int | None) -> None:
    """A mask of the right sizes; `seen` None where reading it would wait for the device."""
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        keys = f"at least {length}" if seen is None else str(seen + length)
        fits = shape[1] >= length if seen is None else shape[1] == seen + length
        if shape[0] != batch or not fits:
            raise ValueError(
                f"attention_mask: expected [{batch}, {keys}], the cached tokens and these, got "
                f"shape {shape}"
            )
    elif mask.dim() == 4 and (shape[0] not in (1, batch) or shape[2] not in (1, length)):
        raise ValueError(
            f"attention_mask: expected [{batch} or 1, heads, {length}, keys], got shape {shape}"
        )
