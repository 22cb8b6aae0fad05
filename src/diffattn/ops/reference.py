"""The eager definition: the specification every other implementation is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.ops.difference import subtract_maps
from diffattn.ops.masks import additive_and_visible, band, both
from diffattn.ops.precision import own_precision


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

    Returns:
        A1 [B, H, T, S] and A2 [B, N, T, S], in fp32 (fp64 for fp64 inputs).

    Source: Ye et al., arXiv 2410.05258, Eq. 1.
    """
    options = {"causal": causal, "window": window, "mask": mask, "scale": scale}
    noise_keys = k if k_noise is None else k_noise
    with own_precision(q):
        return attention_map(q, k, **options), attention_map(q_noise, noise_keys, **options)


def attention_map(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """One softmax map, [B, H, T, S], with exact zeros in a row that sees nothing."""
    work = torch.promote_types(q.dtype, torch.float32)
    length, keys = q.shape[1], k.shape[1]
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q.to(work), k.to(work))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    bias, visible = additive_and_visible(mask)
    if bias is not None:
        scores = scores + bias
    visible = both(
        visible,
        band(
            range(length),
            range(keys),
            offset=keys - length,
            causal=causal,
            window=window,
            device=q.device,
        ),
    )
    if visible is None:
        return scores.softmax(dim=-1)
    # a row of -inf alone would give NaN here and in every gradient behind it
    empty = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    return scores.softmax(dim=-1).masked_fill(empty, 0.0)


def reference_diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None,
    *,
    lam: Tensor | float,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
    shared_dropout: bool,
) -> Tensor:
    """Differential attention by its definition, [B, T, H, E]; memory grows with T x S."""
    signal, noise = diff_attention_maps(
        q, k, q_noise, k_noise, causal=causal, window=window, mask=mask, scale=scale
    )
    if dropout and shared_dropout:
        difference = F.dropout(subtract_maps(signal, noise, lam), dropout)
    elif dropout:
        difference = subtract_maps(F.dropout(signal, dropout), F.dropout(noise, dropout), lam)
    else:
        difference = subtract_maps(signal, noise, lam)
    return _weighted_values(difference, v).to(q.dtype)


def reference_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Softmax attention by its definition, [B, T, H, E]."""
    weights = attention_map(q, k, causal=causal, window=window, mask=mask, scale=scale)
    return _weighted_values(F.dropout(weights, dropout) if dropout else weights, v).to(q.dtype)


def _weighted_values(weights: Tensor, v: Tensor) -> Tensor:
    v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshe->bthe", weights, v.to(weights.dtype))
