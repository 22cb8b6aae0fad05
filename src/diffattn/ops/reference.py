"""The eager definition: the specification every other implementation is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.ops.arguments import check_noise, check_queries_keys, check_scoring, check_sinks
from diffattn.ops.difference import subtract_maps
from diffattn.ops.masks import additive_and_visible, band, blank_unseen, both
from diffattn.ops.precision import own_precision
from diffattn.ops.scoring import Scoring


def diff_attention_maps(
    q: Tensor,
    k: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sink_noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both softmax maps of differential attention, before the subtraction.

        A1 = softmax(q k^T s + M),  A2 = softmax(q_noise k_noise^T s + M)

    Args:
        q: [B, T, H, D] signal queries.
        k: [B, S, G, D] signal keys.
        q_noise: [B, T, N, D] noise queries.
        k_noise: [B, S, G, D] noise keys; None means the signal's.
        causal: see `diff_attention`; so for the other arguments.
        window: see `diff_attention`.
        mask: see `diff_attention`.
        scale: see `diff_attention`.
        softcap: see `diff_attention`.
        sink: see `diff_attention`.
        sink_noise: see `diff_attention`.

    Returns:
        A1 [B, H, T, S] and A2 [B, N, T, S], in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: as in `diff_attention`.

    Source: Ye et al., arXiv 2410.05258, Eq. 1.
    """
    scoring = Scoring(causal=causal, window=window, mask=mask, scale=scale, softcap=softcap)
    check_queries_keys(q, k)
    check_noise(q, k, q_noise, k_noise)
    check_scoring(scoring, q, k, noise_heads=q_noise.shape[2])
    sinks = check_sinks(sink, sink_noise, q.shape[2], q_noise.shape[2])
    noise_keys = k if k_noise is None else k_noise
    with own_precision(q):
        return (
            attention_map(q, k, scoring, sink=sinks[0]),
            attention_map(q_noise, noise_keys, scoring, sink=sinks[1]),
        )


def attention_map(q: Tensor, k: Tensor, scoring: Scoring, *, sink: Tensor | None = None) -> Tensor:
    """One softmax map, [B, H, T, S], with exact zeros in a row that sees nothing."""
    work = torch.promote_types(q.dtype, torch.float32)
    bias, visible = _bias_and_visible(scoring, q.shape[1], k)
    k = blank_unseen(k, visible).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q.to(work), k.to(work))
    scores = scores * scoring.factor(q.shape[-1])
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if visible is None:
        return _softmax(scores, sink)
    # a row of -inf alone would give NaN here and in every gradient behind it
    empty = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    return _softmax(scores, sink).masked_fill(empty, 0.0)


def _bias_and_visible(
    scoring: Scoring, length: int, keys: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of `length` queries, and what mask and positions let be seen."""
    bias, visible = additive_and_visible(scoring.mask)
    count = keys.shape[1]
    by_position = band(
        slice(0, length),
        slice(0, count),
        offset=count - length,
        causal=scoring.causal,
        window=scoring.window,
        device=keys.device,
    )
    return bias, both(visible, by_position)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return scores.softmax(dim=-1)
    column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def reference_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    scoring: Scoring,
    *,
    lam: Tensor | float,
    sinks: tuple[Tensor | None, Tensor | None],
    shared_dropout: bool,
) -> Tensor:
    """Differential attention by its definition, [B, T, H, E]; memory grows with T x S."""
    signal = attention_map(q, k, scoring, sink=sinks[0])
    noise = attention_map(q_noise, k if k_noise is None else k_noise, scoring, sink=sinks[1])
    if scoring.dropout and not shared_dropout:
        signal, noise = F.dropout(signal, scoring.dropout), F.dropout(noise, scoring.dropout)
    difference = subtract_maps(signal, noise, lam)
    if scoring.dropout and shared_dropout:
        difference = F.dropout(difference, scoring.dropout)
    return _weighted_values(difference, v, scoring).to(q.dtype)


def reference_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, sink: Tensor | None
) -> Tensor:
    """Softmax attention by its definition, [B, T, H, E]."""
    weights = attention_map(q, k, scoring, sink=sink)
    weights = F.dropout(weights, scoring.dropout) if scoring.dropout else weights
    return _weighted_values(weights, v, scoring).to(q.dtype)


def _weighted_values(weights: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    v = blank_unseen(v, _bias_and_visible(scoring, weights.shape[2], v)[1])
    v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshe->bthe", weights, v.to(weights.dtype))
