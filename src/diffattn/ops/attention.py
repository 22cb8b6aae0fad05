"""The public operators: an implementation is chosen here.

Axis letters: B batch, T query length, S key length, H signal (= output) heads, N noise heads,
G key/value heads, D query and key width, E value width.
"""

from typing import Literal

from torch import Tensor

from diffattn.ops.arguments import (
    check_lam,
    check_noise,
    check_queries_keys,
    check_scoring,
    check_sink,
    check_sinks,
    check_values,
)
from diffattn.ops.blocked import blocked_diff_attention, blocked_softmax_attention
from diffattn.ops.choice import (
    Implementation,
    choose_implementation,
    fastest_implementation,
    log_choice,
)
from diffattn.ops.fused import fused_diff_attention, fused_softmax_attention
from diffattn.ops.gpu import gpu_diff_attention
from diffattn.ops.one_call import one_call_diff_attention
from diffattn.ops.precision import own_precision
from diffattn.ops.reference import reference_diff_attention, reference_softmax_attention
from diffattn.ops.scoring import Scoring
from diffattn.ops.sdpa import sdpa_diff_attention, sdpa_softmax_attention

_DIFF = {
    "sdpa": sdpa_diff_attention,
    "one_call": one_call_diff_attention,
    "blocked": blocked_diff_attention,
    "fused": fused_diff_attention,
    "triton": gpu_diff_attention,
}
_SOFTMAX = {
    "reference": reference_softmax_attention,
    "sdpa": sdpa_softmax_attention,
    "blocked": blocked_softmax_attention,
    "fused": fused_softmax_attention,
}


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor,
    k_noise: Tensor | None = None,
    *,
    lam: Tensor | float,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sink_noise: Tensor | None = None,
    dropout: float = 0.0,
    dropout_masks: Literal["shared", "independent"] = "shared",
    impl: Implementation = "auto",
) -> Tensor:
    """Differential attention: one softmax map minus a scaled second one.

        out = (softmax(q k^T s + M) - lam * softmax(q_noise k_noise^T s + M)) v

    Each map is normalised first, then subtracted; entries of the difference may be negative.

    Args:
        q: [B, T, H, D] signal queries.
        k: [B, S, G, D] signal keys; G divides H and N. Query head h reads group h // (H/G).
        v: [B, S, G, E] values, shared by both maps.
        q_noise: [B, T, N, D] noise queries; N divides H, noise head n serves the H/N signal
            heads from n H/N on.
        k_noise: [B, S, G, D] noise keys; None means the signal's (V2).
        lam: a number, 0-dimensional, [H] or [B, T, H] tensor; used in fp32.
        causal: hide later keys, the last query standing at the last key (bottom right) when
            T != S.
        window: a query sees keys less than this many positions away, its own included.
        mask: bool (True = visible) or float (added to the scores; -inf and the lowest finite
            number of fp16, bf16, fp32 or fp64 hide), broadcastable to [B, H, T, S]; applied to
            both maps. A mask that differs by head needs N = H.
        scale: s; None means D^-1/2.
        softcap: c, bounds the scores before the mask: x becomes c tanh(x / c).
        sink: [H] logit of a key without a value that every signal map also weighs, so that its
            row sums to less than 1.
        sink_noise: [N] the same for the noise maps; given with `sink`.
        dropout: probability of dropping an entry of the maps; pass 0 in evaluation.
        dropout_masks: "shared" drops the same entries of both maps, "independent" draws a mask
            for each map.
        impl: "reference" (eager definition, memory T x S), "sdpa" (torch's kernel, one call for
            each map, memory linear in length), "one_call" (one stock attention call), "blocked"
            (maps subtracted before the product with v, memory linear in length; plain operations
            on blocks of rows; no dropout, no soft cap, no gradient of a mask), "fused" (the same
            on CPUs, compiled once by the machine's g++), "triton" (on GPUs: both maps in one pass;
            the same three refused, fp64 too; few queries without gradients are split over the
            keys) or "auto": "reference" where dropout needs a shared mask or scores are capped;
            else on a CPU "fused", or "blocked" where the machine has no compiler, as
            `diffattn.ops.choice.fastest_implementation` says; else "sdpa".
            Torch itself drops entries on a CPU only by building the whole map.

    Returns:
        [B, T, H, E] in the dtype of `q`; no norm, no (1 - lambda_init) factor. A query that sees
        no key gives exact zeros and finite gradients.

    Raises:
        ValueError: shapes or values disagree; the message names the argument, what was expected
            and what came.
        NotImplementedError: the named `impl` cannot serve these arguments; a name never falls
            back to another implementation.

    Example:
        >>> q, k, q_noise, k_noise = torch.randn(4, 1, 5, 2, 8).unbind(0)
        >>> v = torch.randn(1, 5, 2, 16)
        >>> diff_attention(q, k, v, q_noise, k_noise, lam=0.2, causal=True).shape
        torch.Size([1, 5, 2, 16])

    Source: Ye et al., arXiv 2410.05258, Eq. 1; shared noise keys after Differential Transformer
        V2 (January 2026); N < H after arXiv 2510.06949; soft cap after Gemma 2 (arXiv
        2408.00118), sinks after gpt-oss (arXiv 2508.10925).
    Differs: the paper writes one head; this takes all heads, grouped keys and grouped noise
        heads. The authors' naive file repeats grouped keys before pairing them, which reads one
        key for both maps; here, as in their flash files, a pair keeps (k, k_noise).
    """
    scoring = Scoring(causal, window, mask, scale, softcap, dropout)
    check_queries_keys(q, k)
    check_values(v, k)
    check_noise(q, k, q_noise, k_noise)
    check_lam(lam, q)
    check_scoring(scoring, q, k, noise_heads=q_noise.shape[2])
    sinks = check_sinks(sink, sink_noise, q.shape[2], q_noise.shape[2])
    shared_dropout = dropout > 0 and dropout_masks == "shared"
    chosen = choose_implementation(impl, softcap, dropout, dropout_masks)
    if impl == "auto":
        if chosen != "reference":
            given = (q, k, v, q_noise, k_noise, lam, *sinks)
            chosen = fastest_implementation(*given, mask=mask, dropout=dropout)
        log_choice("diff_attention", chosen, q.device)
    if chosen == "reference":
        with own_precision(q):
            return reference_diff_attention(
                q,
                k,
                v,
                q_noise,
                k_noise,
                scoring,
                lam=lam,
                sinks=sinks,
                shared_dropout=shared_dropout,
            )
    run = _DIFF[chosen]
    with own_precision(q):
        return run(q, k, v, q_noise, k_noise, scoring, lam=lam, sinks=sinks)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    impl: Literal["auto", "reference", "sdpa", "blocked", "fused"] = "auto",
) -> Tensor:
    """Softmax attention, the baseline, under the same conventions.

        out = softmax(q k^T s + M) v

    Args:
        q: [B, T, H, D] queries.
        k: [B, S, G, D] keys; G divides H.
        v: [B, S, G, E] values.
        causal: as in `diff_attention`; so for the other arguments.
        window: as in `diff_attention`.
        mask: as in `diff_attention`.
        scale: s; None means D^-1/2.
        softcap: as in `diff_attention`.
        sink: [H], as in `diff_attention`.
        dropout: probability of dropping an entry of the map; pass 0 in evaluation.
        impl: "reference", "sdpa", "blocked", "fused" or "auto", as in `diff_attention`.

    Returns:
        [B, T, H, E] in the dtype of `q`.

    Raises:
        ValueError: shapes or values disagree.
        NotImplementedError: the named `impl` cannot serve these arguments.

    Source: Vaswani et al., arXiv 1706.03762, Eq. 1.
    """
    scoring = Scoring(causal, window, mask, scale, softcap, dropout)
    check_queries_keys(q, k)
    check_values(v, k)
    check_scoring(scoring, q, k)
    check_sink("sink", sink, q.shape[2])
    if impl in ("one_call", "triton"):
        raise ValueError(
            f"impl: expected 'auto', 'reference', 'sdpa', 'blocked' or 'fused', got {impl!r}"
        )
    chosen = choose_implementation(impl, softcap, dropout, "independent")
    if impl == "auto":
        if chosen != "reference":
            chosen = fastest_implementation(q, k, v, sink, mask=mask, dropout=dropout)
        log_choice("softmax_attention", chosen, q.device)
    run = _SOFTMAX[chosen]
    with own_precision(q):
        return run(q, k, v, scoring, sink=sink)
