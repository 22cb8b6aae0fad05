"""Entropy of attention rows in blocks, without the maps."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.errors import UserError

NAME = "diffattn_entropy"
_ROWS = 128


class EntropyMeter:
    """An attention implementation that adds up the entropy of its rows, head by head.

        H = log sum_j exp(s_j) - sum_j p_j s_j   (nats)

    Rows are worked on in blocks, so memory grows linearly with the length.

    Args:
        skip: first positions of each sequence that do not count.
        first_key: whether the first key counts; False measures p over the other keys.
    """

    def __init__(self, *, skip: int = 32, first_key: bool = True) -> None:
        self.skip, self.first_key = skip, first_key
        self.sums: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}

    def means(self, layer: int) -> Tensor:
        """Mean entropy of each query head of a layer, [heads], fp64, in nats."""
        return self.sums[layer] / self.rows[layer]

    def __enter__(self) -> "EntropyMeter":
        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        return self

    def __exit__(self, *_: object) -> None:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(NAME)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if s_aux is not None:
            raise UserError(
                "criterion: entropy does not know attention with sinks; choose importance"
            )
        layer: Any = module.layer_idx
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
        outputs = []
        for start in range(0, query.shape[2], _ROWS):
            rows = slice(start, min(start + _ROWS, query.shape[2]))
            # without a mask there are as many keys as queries, none of them after the last row
            keys = rows.stop if attention_mask is None and causal else key.shape[2]
            scores = (query[:, :, rows] @ key[:, :, :keys].transpose(2, 3)).float() * factor
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            scores = _masked(scores, attention_mask, rows, causal=causal)
            logs = scores.logsumexp(-1, keepdim=True)
            weights = (scores - logs).exp_()
            self._add(layer, scores, weights, logs, max(0, self.skip - start))
            outputs.append(weights.to(value.dtype) @ value[:, :, :keys])
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None

    def _add(self, layer: int, scores: Tensor, weights: Tensor, logs: Tensor, skip: int) -> None:
        scores, weights, logs = (t[:, :, skip:] for t in (scores, weights, logs))
        if not self.first_key:
            scores = scores[..., 1:]
            logs = scores.logsumexp(-1, keepdim=True)
            weights = (scores - logs).exp_()
        if not scores.numel():
            return
        # what is hidden has the score -inf and no weight
        expected = (weights * scores.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)
        entropy = logs.squeeze(-1) - expected
        if layer not in self.sums:
            self.sums[layer] = torch.zeros(scores.shape[1], dtype=torch.float64)
            self.rows[layer] = 0
        self.sums[layer] += entropy.sum((0, 2), dtype=torch.float64).cpu()
        self.rows[layer] += scores.shape[0] * scores.shape[2]


def _masked(scores: Tensor, mask: Tensor | None, rows: slice, *, causal: bool) -> Tensor:
    if mask is not None:
        part = mask[:, :, rows, : scores.shape[-1]]
        if part.dtype == torch.bool:
            return scores.masked_fill(~part, -math.inf)
        return scores + part
    if causal:
        keys = torch.arange(scores.shape[-1], device=scores.device)
        own = torch.arange(rows.start, rows.stop, device=scores.device)
        return scores.masked_fill(keys > own[:, None], -math.inf)
    return scores
