"""A step of decoding: lam, attention and head norm in one call of the kernel, without gradients."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from diffattn.ops.fused.library import library
from diffattn.ops.fused.operators import KINDS
from diffattn.ops.layout import split_stripes
from diffattn.ops.masks import added_and_used
from diffattn.ops.plain import are_plain
from diffattn.ops.scoring import Scoring

MOST_QUERIES = 4
"""kFewQueries of the kernel"""
_Sizes, _Pointers, _Strides = ctypes.c_int64 * 10, ctypes.c_void_p * 15, ctypes.c_int64 * 25
_Place = tuple[int, tuple[int, ...]]
"""address and strides of rows"""
_NO_ROWS: _Place = (0, (0, 0, 0))


class LamVectors(NamedTuple):
    """lam = exp(q1 . k1) - exp(q2 . k2) + start, as `exponential_lambda` has it."""

    q1: Tensor
    """[D], or [n, D] for n coefficients; so are the other three"""
    k1: Tensor
    q2: Tensor
    k2: Tensor
    start: float
    share: int
    """neighbouring signal heads that one coefficient serves"""


class HeadScale(NamedTuple):
    """y = x / sqrt(mean(x^2) + eps) gain factor, of each head."""

    gain: Tensor
    """[E]"""
    factor: float
    eps: float


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("scale", "start", "factor", "eps")),
        *((name, ctypes.c_int64) for name in ("lam_width", "lam_share")),
    )


def is_plain_call(*tensors: Tensor | None) -> bool:
    """Whether nobody differentiates or traces a call on these."""
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return are_plain(given)


def can_step(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None) -> bool:
    """Whether a call is a step that the kernel takes whole.

    Args:
        q: [B, T, heads, D].
        k: [B, S, G, W].
        v: [B, S, G, E].
        *given: everything else that is a tensor: mask, parameters.
    """
    if not (q.device.type == "cpu" and 0 < q.shape[1] <= MOST_QUERIES and q.dtype in KINDS):
        return False
    if any(t.dtype != q.dtype or t.stride(-1) != 1 for t in (k, v)) or q.stride(-1) != 1:
        return False
    return is_plain_call(q, k, v, *given)


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    *,
    ratio: int,
    own_noise_key: bool,
    value_dim: int,
    lam: Tensor | LamVectors | None = None,
    sinks: Tensor | None = None,
    norm: HeadScale | None = None,
) -> Tensor:
    """Attend from at most `MOST_QUERIES` queries; `can_step` says where.

    Args:
        q: [B, T, H + N, D] in stripes of `ratio` signal heads and their noise head.
        k: [B, S, G, W]; W = 2 D for [k | k'] of a layer with noise keys of its own.
        v: [B, S, G, E or more].
        scoring: order, mask and scale; no window, no soft cap, no dropout.
        ratio: r = H/N; 0 for softmax attention, where all heads are signal heads.
        own_noise_key: whether `k` holds noise keys.
        value_dim: E.
        lam: a tensor that broadcasts to [B, T, H], or what it is made of.
        sinks: [H + N] in stripes.
        norm: of the heads.

    Returns:
        [B, T, H, E] in the dtype of `q`.
    """
    batch, length, stacked, width = q.shape
    keys, groups = k.shape[1:3]
    noise_heads = stacked // (ratio + 1) if ratio else 0
    heads = stacked - noise_heads
    work = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
    out = q.new_empty(batch, length, heads, value_dim)
    # tensors made here must live until the kernel has read them
    split = split_stripes(q, ratio) if ratio > 1 else ()
    if split:
        signal, noise = (_rows(tensor) for tensor in split)
    elif ratio == 1:  # pairs are read where they lie
        place, (batch_step, time_step, head_step) = _rows(q)
        pairs = batch_step, time_step, 2 * head_step
        signal, noise = (place, pairs), (place + head_step * q.element_size(), pairs)
    else:
        signal, noise = _rows(q), _NO_ROWS
    key, value, result = _rows(k), _rows(v), _rows(out)
    key_noise = (key[0] + width * k.element_size(), key[1]) if own_noise_key else _NO_ROWS
    step = _Step(scoring.factor(width), 0.0, 1.0, 0.0, 0, 1)
    mask = lams = gain = sink = sink_noise = None
    if scoring.mask is not None:
        added, _ = added_and_used(scoring.mask, length, keys, causal=scoring.causal, window=None)
        assert added is not None
        mask = added.to(work).expand(batch, heads, length, keys)
    vectors: list[Tensor] = []
    if isinstance(lam, LamVectors):
        vectors = [vector.to(work).contiguous() for vector in lam[:4]]
        step.start, step.lam_width, step.lam_share = lam.start, lam.q1.shape[-1], lam.share
    elif lam is not None:
        lams = lam.to(work).expand(batch, length, heads)
    if sinks is not None:
        stripes = sinks.to(work).unflatten(0, (-1, ratio + 1))
        sink = stripes[:, : max(1, ratio)].flatten().contiguous()
        sink_noise = stripes[:, ratio].contiguous() if ratio else None
    if norm is not None:
        gain = norm.gain.to(work)
        step.factor, step.eps = norm.factor, norm.eps
    lam_strides = _NO_ROWS[1] if lams is None else lams.stride()
    strides = (
        *(*signal[1], *key[1], *value[1], *noise[1], *key_noise[1]),
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        *lam_strides,
        *result[1],
    )
    pointers = (
        *(signal[0], key[0], value[0], noise[0], key_noise[0]),
        *(_pointer(tensor) for tensor in (mask, lams, sink, sink_noise)),
        *(result[0], _pointer(gain)),
        *([vector.data_ptr() for vector in vectors] or (0, 0, 0, 0)),
    )
    sizes = (batch, length, keys, heads, noise_heads, groups, width, value_dim)
    library().diff_attention_step(
        KINDS.index(q.dtype),
        _Sizes(*sizes, scoring.causal, scoring.window or 0),
        _Pointers(*pointers),
        _Strides(*strides),
        ctypes.byref(step),
    )
    return out


def _rows(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.stride()[:3]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
