"""Torch's scaled-dot-product kernel, one call for each map; memory linear in length."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.ops.difference import subtract_outputs
from diffattn.ops.masks import (
    additive_and_visible,
    band,
    blank_unseen,
    block_of,
    both,
    four_axes,
    reach,
)
from diffattn.ops.scoring import Scoring

# Rows of queries that share one explicit mask: small enough that a block of the mask
# (rows x keys) stays far below the keys themselves, large enough to keep the kernel busy.
BLOCK_ROWS = 256


def sdpa_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    scoring: Scoring,
    *,
    lam: Tensor | float,
    sinks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Differential attention as two softmax attentions over the same values, [B, T, H, E]."""
    signal = sdpa_softmax_attention(q, k, v, scoring, sink=sinks[0])
    noise_keys = k if k_noise is None else k_noise
    noise = sdpa_softmax_attention(q_noise, noise_keys, v, scoring, sink=sinks[1])
    return subtract_outputs(signal, noise, lam)


def sdpa_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, sink: Tensor | None
) -> Tensor:
    """Softmax attention by torch's kernel, [B, T, H, E], with bottom-right causal alignment."""
    causal, window = scoring.causal, scoring.window
    length, keys = q.shape[1], k.shape[1]
    factor = scoring.factor(q.shape[-1])
    if factor <= 0:  # torch's causal kernel on a CPU gives NaN there
        q, factor = q * factor, 1.0
    kernel = _Kernel(factor, scoring.dropout)
    if scoring.mask is None and window is None and sink is None:
        if not causal or (length == 1 and keys > 0):
            return kernel(q, k, v)
        if length == keys:
            return kernel(q, k, v, causal=True)
    bias, seen = additive_and_visible(scoring.mask)
    # an exported program serves every length, so it cannot have a number of blocks
    height = length if torch.compiler.is_exporting() else BLOCK_ROWS
    blocks = []
    start = 0
    while start < length:
        rows = slice(start, min(start + height, length))
        columns = slice(0, keys)
        if not torch.compiler.is_exporting():
            columns = reach(rows, keys, offset=keys - length, causal=causal, window=window)
        part = rows, columns
        visible = both(
            block_of(seen, *part),
            band(*part, offset=keys - length, causal=causal, window=window, device=q.device),
        )
        # without a mask, `columns` has no other keys than those that are seen
        hides = visible if seen is not None or torch.compiler.is_exporting() else None
        block = q[:, rows], blank_unseen(k[:, columns], hides), blank_unseen(v[:, columns], hides)
        if sink is None:
            blocks.append(_masked(kernel, *block, block_of(bias, *part), visible))
        else:
            blocks.append(_with_sink(kernel, *block, block_of(bias, *part), visible, sink))
        start += height
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _masked(
    kernel: "_Kernel",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Tensor | None,
) -> Tensor:
    if visible is None:
        return kernel(q, k, v, bias if bias is None else bias.to(q.dtype))
    # kernels differ on rows without a visible key (zeros, NaN, NaN gradients):
    # let such a row see everything, then blank it
    empty = ~visible.any(dim=-1, keepdim=True)
    visible = visible | empty
    attn_mask = visible
    if bias is not None:
        attn_mask = _shifted(bias.masked_fill(~visible, float("-inf")), q.dtype)
    out = kernel(q, k, v, attn_mask)
    return out.masked_fill(four_axes(empty).transpose(1, 2), 0.0)


def _with_sink(
    kernel: "_Kernel",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """The sink as one more key: zeros, so that its score is its bias, with a value of zeros."""
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    work = torch.promote_types(sink.dtype, torch.promote_types(q.dtype, torch.float32))
    scores = sink.new_zeros((), dtype=work) if bias is None else four_axes(bias).to(work)
    if visible is not None:
        scores = scores.masked_fill(~four_axes(visible), float("-inf"))
    column = sink.to(work)[None, :, None, None].expand(*shape[:3], 1)
    attn_mask = _shifted(torch.cat((scores.expand(shape), column), dim=-1), q.dtype)
    return kernel(q, F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1)), attn_mask)


def _shifted(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the products, in their dtype; each row has a number that is not -inf.

    Softmax ignores a shift of its row: without the largest of them, what decides is near 0, where
    half precision resolves it best.
    """
    if dtype.itemsize < 4:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores - scores.detach().amax(-1, keepdim=True)
    return scores.to(dtype)


class _Kernel(NamedTuple):
    """Torch's kernel for (batch, time, heads, width), with its scale and dropout."""

    scale: float
    dropout: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        # torch's memory-linear kernels take one width for queries, keys and values
        value_width = v.shape[-1]
        width = max(q.shape[-1], value_width)
        wide = [F.pad(t, (0, width - t.shape[-1])).transpose(1, 2) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *wide,
            attn_mask=attn_mask if attn_mask is None else four_axes(attn_mask),
            dropout_p=self.dropout,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        out = out.transpose(1, 2)[..., :value_width]
        if q.device.type == "cpu" and not torch.compiler.is_exporting() and k.shape[1] < 8:
            out = out + 0.0 * q.sum(-1, keepdim=True)  # there the kernel loses NaN of a query
        return out
