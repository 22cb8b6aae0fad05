"""Positions of tokens, with the packed documents that they tell apart."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices

from diffattn.ops.patterns import documents_of_lengths


def count_positions(
    x: Tensor, attention_mask: object, cache: Cache | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Positions [B or 1, T], counting the visible tokens of each row, or of each document."""
    length = x.shape[1]
    place = torch.arange(length, device=x.device)
    if cu_seqlens is not None:
        return (place - cu_seqlens[documents_of_lengths(cu_seqlens)]).long()
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (place + (0 if cache is None else cache.get_seq_length()))[None]


def separate_documents(
    position_ids: Tensor | None,
    padding: Tensor | None,
    cache: Cache | None,
    cu_seqlens: Tensor | None = None,
) -> Callable | None:
    """Mask function that keeps packed documents apart, or None where there is one.

    They are told by `cu_seqlens`, else by positions that start anew. transformers looks for the
    latter alone, and only without a padding mask and without a cache. What a cache holds belongs
    to the first document.
    """
    if cache is not None and not isinstance(cache, Cache):  # continuous batching has its own
        return None
    if cu_seqlens is not None:
        documents = documents_of_lengths(cu_seqlens)
    elif position_ids is not None and position_ids.shape[1] > 1:
        documents = find_packed_sequence_indices(position_ids)
    else:
        return None
    if documents is None:
        return None
    length, seen = documents.shape[1], 0
    keys = length if padding is None else padding.shape[1]
    if cache is not None:  # layers with a window hold fewer
        seen = int(cache.get_seq_length())
        layers = range(max(1, len(cache.layers)))
        keys = max(sum(cache.get_mask_sizes(length, index)) for index in layers)
    of_keys = F.pad(F.pad(documents, (seen, 0)), (0, max(0, keys - seen - length)), value=-1)
    rows = documents.shape[0] - 1  # positions may stand once for the whole batch

    def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch.clamp(max=rows)
        return documents[row, query - seen] == of_keys[row, key]

    return same
