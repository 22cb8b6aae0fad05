"""Differential attention as one ordinary attention call, for engines that serve nothing else.

V1 becomes queries [q | 0] and [0 | q'], keys [k | k'] and values of twice the head width; V2 is
one call as it stands. A stock grouped-query kernel then computes both maps, and the outputs are
subtracted. With an own noise key the products cost twice the FLOPs of softmax attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.ops.difference import subtract_outputs
from diffattn.ops.layout import join_stripes, split_stripes
from diffattn.ops.scoring import Scoring
from diffattn.ops.sdpa import sdpa_softmax_attention


def stack_queries(q: Tensor, q_noise: Tensor, *, own_noise_key: bool) -> Tensor:
    """Signal and noise queries as the heads of one attention call.

    Args:
        q: [B, T, H, D] signal queries.
        q_noise: [B, T, N, D] noise queries; N divides H.
        own_noise_key: whether keys are [k | k']; queries then become [q | 0] and [0 | q'].

    Returns:
        [B, T, H + N, W], W = 2 D with an own noise key, else D, in the order of `join_stripes`.
    """
    if own_noise_key:
        width = q.shape[-1]
        q, q_noise = F.pad(q, (0, width)), F.pad(q_noise, (width, 0))
    return join_stripes(q, q_noise)


def stack_keys(k: Tensor, k_noise: Tensor | None) -> Tensor:
    """Keys of one attention call, [k | k'] along the width; [B, S, G, W]."""
    return k if k_noise is None else torch.cat((k, k_noise), dim=-1)


def stack_sinks(sink: Tensor | None, sink_noise: Tensor | None) -> Tensor | None:
    """Sinks [H] and [N] in the order of `stack_queries`, [H + N]; None where there are none."""
    if sink is None or sink_noise is None:
        return None
    return join_stripes(sink[None, None, :, None], sink_noise[None, None, :, None]).flatten()


def one_call_diff_attention(
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
    """Differential attention through one softmax attention call, [B, T, H, E]."""
    mask = scoring.mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.repeat_interleave(2, dim=-3)  # signal and noise of each pair
    out = sdpa_softmax_attention(
        stack_queries(q, q_noise, own_noise_key=k_noise is not None),
        stack_keys(k, k_noise),
        v,
        scoring._replace(mask=mask, scale=scoring.factor(q.shape[-1])),
        sink=stack_sinks(*sinks),
    )
    return subtract_outputs(*split_stripes(out, q.shape[2] // q_noise.shape[2]), lam)
