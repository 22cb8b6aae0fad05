"""The public operators: arguments are checked here, an implementation is chosen here.

Axis letters: B batch, T query length, S key length, H signal (= output) heads, N noise heads,
G key/value heads, D query and key width, E value width.
"""

import functools
import logging
import math
from typing import Literal

import torch
from torch import Tensor

from diffattn.ops.one_call import one_call_diff_attention
from diffattn.ops.precision import own_precision
from diffattn.ops.reference import reference_diff_attention, reference_softmax_attention
from diffattn.ops.scoring import Scoring
from diffattn.ops.sdpa import sdpa_diff_attention, sdpa_softmax_attention

Implementation = Literal["auto", "reference", "sdpa", "one_call"]
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "sdpa", "one_call")

_logger = logging.getLogger(__name__)


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
        mask: bool (True = visible) or float (added to the scores), broadcastable to
            [B, H, T, S]; applied to both maps. A mask that differs by head needs N = H.
        scale: s; None means D^-1/2.
        softcap: c, bounds the scores before the mask: x becomes c tanh(x / c).
        sink: [H] logit of a key without a value that every signal map also weighs, so that its
            row sums to less than 1.
        sink_noise: [N] the same for the noise maps; given with `sink`.
        dropout: probability of dropping an entry of the maps; pass 0 in evaluation.
        dropout_masks: "shared" drops the same entries of both maps, "independent" draws a mask
            for each map.
        impl: "reference" (eager definition, memory T x S), "sdpa" (torch's kernel, one call for
            each map, memory linear in length), "one_call" (one stock attention call) or "auto":
            "reference" where dropout needs a shared mask or scores are capped, else "sdpa".
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
    _check_tensors(q, k, v)
    _check_noise(q, k, q_noise, k_noise, mask)
    _check_lam(lam, q)
    _check_scoring(scoring, q, k)
    sinks = _check_sinks(sink, sink_noise, q.shape[2], q_noise.shape[2])
    shared_dropout = dropout > 0 and dropout_masks == "shared"
    chosen = choose_implementation(impl, softcap, dropout, dropout_masks)
    if impl == "auto" and not torch.compiler.is_compiling():
        _log_choice("diff_attention", chosen, q.device.type)
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
    run = sdpa_diff_attention if chosen == "sdpa" else one_call_diff_attention
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
    impl: Literal["auto", "reference", "sdpa"] = "auto",
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
        impl: "reference", "sdpa" or "auto" ("reference" where scores are capped, else "sdpa").

    Returns:
        [B, T, H, E] in the dtype of `q`.

    Raises:
        ValueError: shapes or values disagree.
        NotImplementedError: the named `impl` cannot serve these arguments.

    Source: Vaswani et al., arXiv 1706.03762, Eq. 1.
    """
    scoring = Scoring(causal, window, mask, scale, softcap, dropout)
    _check_tensors(q, k, v)
    _check_scoring(scoring, q, k)
    _check_sink("sink", sink, q.shape[2])
    if impl == "one_call":
        raise ValueError("impl: expected 'auto', 'reference' or 'sdpa', got 'one_call'")
    chosen = choose_implementation(impl, softcap, dropout, "independent")
    run = reference_softmax_attention if chosen == "reference" else sdpa_softmax_attention
    with own_precision(q):
        return run(q, k, v, scoring, sink=sink)


def choose_implementation(
    impl: str, softcap: float | None, dropout: float, dropout_masks: str
) -> str:
    """The implementation that runs; layers ask when they are built, the operator at each call.

    Args:
        impl: a name, or "auto".
        softcap: of the scores.
        dropout: probability.
        dropout_masks: "shared" or "independent".

    Returns:
        One of `IMPLEMENTATIONS`.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: the named implementation cannot serve the other arguments.
    """
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected 'auto' or one of {IMPLEMENTATIONS}, got {impl!r}")
    if dropout_masks not in ("shared", "independent"):
        raise ValueError(
            f"dropout_masks: expected 'shared' or 'independent', got {dropout_masks!r}"
        )
    shared_dropout = dropout > 0 and dropout_masks == "shared"
    if impl == "auto":
        return "reference" if shared_dropout or softcap is not None else "sdpa"
    if impl != "reference" and shared_dropout:
        raise NotImplementedError(
            f"impl={impl!r} draws a dropout mask for each map: ask for "
            "dropout_masks='independent', or impl='reference'"
        )
    if impl != "reference" and softcap is not None:
        raise NotImplementedError(
            f"impl={impl!r} runs torch's kernel, which takes no softcap: ask for impl='reference'"
        )
    return impl


@functools.cache
def _log_choice(operator: str, impl: str, device: str) -> None:
    _logger.info("%s: impl='auto' runs %r on %s", operator, impl, device)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 axes (batch, time, heads, width), got shape "
                f"{tuple(tensor.shape)}"
            )
        if not q.is_floating_point():
            raise ValueError(f"q: expected a floating dtype, got {q.dtype}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: expected dtype {q.dtype} as q, got {tensor.dtype}")
    batch, length, heads, width = q.shape
    keys, groups = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(
            f"k: expected (batch, time, heads, width) = ({batch}, S, G, {width}) to match q "
            f"{tuple(q.shape)}, got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected (batch, time, heads) = ({batch}, {keys}, {groups}) to match k, got "
            f"{tuple(v.shape)}"
        )
    if groups == 0 or heads % groups:
        raise ValueError(f"k: {groups} key/value heads do not divide the {heads} heads of q")
    if keys == 0:
        raise ValueError("k: expected at least one key, got S = 0")
    if length == 0 or width == 0:
        raise ValueError(
            f"q: expected at least one query of at least one channel, got T = {length}, D = {width}"
        )


def _check_noise(
    q: Tensor, k: Tensor, q_noise: Tensor, k_noise: Tensor | None, mask: Tensor | None
) -> None:
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    if q_noise.dim() != 4 or (*q_noise.shape[:2], q_noise.shape[3]) != (batch, length, width):
        raise ValueError(
            f"q_noise: expected (batch, time, heads, width) = ({batch}, {length}, N, {width}) "
            f"to match q, got {tuple(q_noise.shape)}"
        )
    if q_noise.dtype != q.dtype:
        raise ValueError(f"q_noise: expected dtype {q.dtype} as q, got {q_noise.dtype}")
    noise_heads = q_noise.shape[2]
    if noise_heads == 0 or heads % noise_heads:
        raise ValueError(f"q_noise: {noise_heads} noise heads do not divide {heads} signal heads")
    if noise_heads % groups:
        raise ValueError(
            f"q_noise: {groups} key/value heads do not divide {noise_heads} noise heads, so a "
            "pair would read two key/value heads"
        )
    if k_noise is not None and (k_noise.shape != k.shape or k_noise.dtype != k.dtype):
        raise ValueError(
            f"k_noise: expected shape {tuple(k.shape)} and dtype {k.dtype} as k, got "
            f"{tuple(k_noise.shape)}, {k_noise.dtype}"
        )
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1 and noise_heads != heads:
        raise ValueError(
            f"mask: {heads // noise_heads} signal heads share a noise head, so the head axis "
            f"must be 1, got {tuple(mask.shape)}"
        )


def _check_lam(lam: Tensor | float, q: Tensor) -> None:
    if not isinstance(lam, Tensor):
        if not isinstance(lam, (int, float)):
            raise ValueError(f"lam: expected a number or a tensor, got {type(lam).__name__}")
        return
    if lam.is_complex():
        raise ValueError(f"lam: expected a real tensor, got {lam.dtype}")
    batch, length, heads, _ = q.shape
    # compared axis by axis: an exported program must not tie the batch to the number of heads
    expected = {0: (), 1: (heads,), 3: (batch, length, heads)}.get(lam.dim())
    if expected is None or any(a != b for a, b in zip(lam.shape, expected, strict=True)):
        raise ValueError(
            f"lam: expected a number, [{heads}] or [{batch}, {length}, {heads}], got shape "
            f"{tuple(lam.shape)}"
        )


def _check_sinks(
    sink: Tensor | None, sink_noise: Tensor | None, heads: int, noise_heads: int
) -> tuple[Tensor | None, Tensor | None]:
    if (sink is None) != (sink_noise is None):
        missing = "sink" if sink is None else "sink_noise"
        raise ValueError(f"{missing}: expected a sink for both maps or for neither, got None")
    _check_sink("sink", sink, heads)
    _check_sink("sink_noise", sink_noise, noise_heads)
    return sink, sink_noise


def _check_sink(name: str, sink: Tensor | None, heads: int) -> None:
    if sink is not None and (tuple(sink.shape) != (heads,) or not sink.is_floating_point()):
        raise ValueError(
            f"{name}: expected one floating logit a head, [{heads}], got {sink.dtype} of shape "
            f"{tuple(sink.shape)}"
        )


def check_numbers(window: int | None, softcap: float | None, dropout: float) -> None:
    """Refuse values of no meaning; layers ask when they are built."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window: expected a whole number, at least 1, got {window}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap: expected a number above 0, got {softcap}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")


def _check_scoring(scoring: Scoring, q: Tensor, k: Tensor) -> None:
    window, scale, softcap = scoring.window, scoring.scale, scoring.softcap
    check_numbers(window, softcap, scoring.dropout)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    mask = scoring.mask
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"mask: expected a bool or float tensor, got {mask.dtype}")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    sizes = tuple(mask.shape)
    if not 1 <= len(sizes) <= 4 or any(
        size not in (1, whole) for size, whole in zip(sizes[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"mask: expected a shape that broadcasts to {full}, got {sizes}")
