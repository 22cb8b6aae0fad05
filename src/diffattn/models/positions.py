"""Positions of tokens, with the packed documents that they tell apart."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices


def count_positions(x: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
    """Positions [B or 1, T], counting the visible tokens of each row where a mask says which."""
    length = x.shape[1]
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    seen = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(length, device=x.device) + seen)[None]


def separate_documents(
    position_ids: Tensor | None, attention_mask: Tensor | None, cache: Cache | None
) -> Callable | None:
    """Mask function that keeps packed documents apart, where transformers would not.

    It recognises them by positions that start anew, but only without a padding mask and without
    a cache; otherwise documents would silently see each other.
    """
    if position_ids is None or (attention_mask is None and cache is None):
        return None
    if attention_mask is not None and attention_mask.dim() != 2:
        return None
    if cache is not None and cache.get_seq_length() > 0:
        return None
    documents = find_packed_sequence_indices(position_ids)
    if documents is None:
        return None
    length = documents.shape[1]
    keys = length
    if cache is not None:  # layers with a window hold fewer
        layers = range(max(1, len(cache.layers)))
        keys = max(cache.get_mask_sizes(length, index)[0] for index in layers)
    of_keys = F.pad(documents, (0, keys - length), value=-1)
    rows = documents.shape[0] - 1  # positions may stand once for the whole batch

    def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch.clamp(max=rows)
        return documents[row, query] == of_keys[row, key]

    return same
