"""The attention call that returns its maps."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from diffattn.ops.reference import attention_map
from diffattn.ops.scoring import Scoring


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The attention call with its maps: softmax(query key^T scaling + mask) value.

    Args:
        module: the calling layer; not read.
        query: [B, heads, T, W].
        key: [B, G, S, W].
        value: [B, G, S, E].
        attention_mask: additive, broadcastable to [B, heads, T, S].
        scaling: factor of the scores.
        dropout: probability of dropping an entry of the map.
        softcap: c, scores x become c tanh(x / c).
        s_aux: [heads] sink logits.
        **kwargs: what other implementations read.

    Returns:
        Outputs [B, T, heads, E] and maps [B, heads, T, S].
    """
    scoring = Scoring(mask=attention_mask, scale=scaling, softcap=softcap)
    maps = attention_map(query.transpose(1, 2), key.transpose(1, 2), scoring, sink=s_aux)
    maps = F.dropout(maps, dropout) if dropout else maps
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (maps.to(value.dtype) @ value).transpose(1, 2), maps.to(query.dtype)
