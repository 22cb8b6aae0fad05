"""Attention rows of the last token of a question, read behind a cached context."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffattn.errors import UserError
from diffattn.evaluation.continuations import ReadContext
from diffattn.nn import DiffAttention
from diffattn.ops.layout import split_stripes

NAME = "eager_diffattn_rows"  # our models let only names with "eager" cap scores and use sinks


@dataclass(frozen=True)
class Rows:
    """Rows of one layer.

    Args:
        used: [heads, S] what multiplies the values; signed in a differential layer.
        signal: [heads, S] the first softmax; `used` in a plain layer.
        noise: [noise heads, S] the second softmax, not yet times its coefficient; None in a
            plain layer.
    """

    used: Tensor
    signal: Tensor
    noise: Tensor | None


@torch.no_grad()
def last_rows(context: ReadContext, ids: Sequence[int]) -> list[Rows]:
    """Where the last token behind a context looks, in every layer.

    Args:
        context: that was read; it is left as it was.
        ids: [n] tokens behind it; only maps [heads, n, S] exist, one layer at a time.

    Returns:
        Rows over context and `ids`, fp32, by layer.

    Raises:
        UserError: the model's attention does not go through the attention interface, or
            subtracts maps in a way that is not known here.
    """
    model, kept = context.model, dict[int, Rows]()
    before = model.config._attn_implementation
    with _registered(kept, model):
        model.set_attn_implementation(NAME)
        try:
            context.extend(ids)
            context.take_back(len(ids))
        finally:
            model.set_attn_implementation(before)
    size = {rows.used.shape[-1] for rows in kept.values()}
    if len(kept) != model.config.num_hidden_layers or len(size) != 1:
        raise UserError(
            f"model: expected rows over the whole text from {model.config.num_hidden_layers} "
            f"layers, got {len(kept)} layers of {sorted(size)} keys from {type(model).__name__}"
        )
    return [kept[layer] for layer in sorted(kept)]


@contextmanager
def _registered(kept: dict[int, Rows], model: nn.Module) -> Iterator[None]:
    recorder = _Recorder(kept)
    hooks = [
        module.register_forward_pre_hook(recorder.see, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, DiffAttention)
    ]
    ALL_ATTENTION_FUNCTIONS.register(NAME, recorder.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(NAME)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME)
        for hook in hooks:
            hook.remove()


class _Recorder:
    """The attention implementation that keeps its last row."""

    def __init__(self, kept: dict[int, Rows]) -> None:
        self.kept, self.hidden = kept, torch.empty(0)

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the layer's input, of which its coefficient may be a function."""
        self.hidden = args[0] if args else kwargs["hidden_states"]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Outputs [B, T, heads, E] of softmax(query key^T scaling + mask) value."""
        if hasattr(module, "lambda_q1") and not isinstance(module, DiffAttention):
            raise UserError(
                f"model: how {type(module).__name__} subtracts its maps is not known; convert it"
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = (query @ key.transpose(2, 3)).float() * factor
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if attention_mask is None:
            ends = torch.arange(key.shape[2], device=key.device)
            own = ends[-query.shape[2] :, None]
            scores = scores.masked_fill(ends > own, -math.inf)
        elif attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask[..., : key.shape[2]], -math.inf)
        else:
            scores = scores + attention_mask[..., : key.shape[2]]
        if s_aux is not None:
            sink = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        self.kept[module.layer_idx] = self._rows(module, weights[:, :, -1:])  # pyright: ignore
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None

    def _rows(self, module: Any, maps: Tensor) -> Rows:
        """Rows from the kernel's maps of the last token, [1, query heads, 1, S]."""
        if not isinstance(module, DiffAttention):
            return Rows(maps[0, :, 0].cpu(), maps[0, :, 0].cpu(), None)
        used = module.combine_maps(self.hidden[:, -1:], maps)
        signal, noise = split_stripes(maps.transpose(1, 2), module.sizes.ratio)
        return Rows(used[0, :, 0].float().cpu(), signal[0, 0].cpu(), noise[0, 0].cpu())
