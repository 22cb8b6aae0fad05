"""Attention by plain operations of torch, complete rows of scores at a time, on any device.

A block of query rows meets all of its keys: both maps are normalised and subtracted before the one
product with v. The backward pass makes both maps again and forms dP = dO v^T once for both.

Axis letters as in `attention`, and r = H/N signal heads of each noise head. Without noise N = H.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffattn.ops.masks import added_and_used, band, blank_unseen, block_of, reach
from diffattn.ops.precision import own_precision
from diffattn.ops.registry import differentiate, operator
from diffattn.ops.scoring import Scoring

# bytes of a block's map that stay in cache; two heads of a long sequence may take twice as many
_BYTES = 8 << 20


def blocked_diff_attention(
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
    """Differential attention, maps subtracted before the product with v, [B, T, H, E]."""
    work = torch.promote_types(q.dtype, torch.float32)
    lams = torch.as_tensor(lam, dtype=work, device=q.device).expand(q.shape[:3])
    return _attend(q, k, v, q_noise, k_noise, lams, scoring, sinks)


def blocked_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, sink: Tensor | None
) -> Tensor:
    """Softmax attention in the same blocks, [B, T, H, E]."""
    return _attend(q, k, v, None, None, None, scoring, (sink, None))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    scoring: Scoring,
    sinks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    if scoring.mask is not None and scoring.mask.requires_grad:
        raise NotImplementedError("impl='blocked' has no gradient of a mask: ask for impl='sdpa'")
    mask, causal, window = scoring.mask, scoring.causal, scoring.window
    added, used = added_and_used(mask, q.shape[1], k.shape[1], causal=causal, window=window)
    work, batch = torch.promote_types(q.dtype, torch.float32), q.shape[0]
    heads = (q if q_noise is None else q_noise).shape[2]

    def keys(x: Tensor | None) -> Tensor | None:  # [B, G, S, width]
        return None if x is None else blank_unseen(x, used).to(work).transpose(1, 2)

    def rows(x: Tensor | None) -> Tensor | None:  # [r, B, N, T, width]
        if x is None:
            return None
        return x.to(work).unflatten(2, (heads, -1)).permute(3, 0, 2, 1, 4)

    out = blocked_forward(
        rows(q),
        *(keys(k), keys(v), rows(q_noise), keys(k_noise)),
        rows(None if lam is None else lam[..., None]),
        None if added is None else added.to(work).expand(batch, heads, -1, -1),
        *(None if x is None else rows(x.expand(batch, 1, -1)[..., None]) for x in sinks),
        causal,
        window,
        scoring.factor(q.shape[-1]),
    )
    return out.permute(1, 3, 2, 0, 4).flatten(2, 3).to(q.dtype)


class _Block(NamedTuple):
    """The part of a call whose maps are made at once."""

    entry: int
    heads: slice
    groups: slice  # as many, or one for all heads
    rows: slice
    keys: slice
    added: Tensor | None  # to the scores, broadcastable to [heads, rows, keys]
    near: Tensor | None  # the same by position, [rows, the last of the keys]
    void: bool  # whether a row may see nothing
    scale: float

    def of(self, x: Tensor) -> Tensor:
        """Of [entries, heads, T, width], [heads, rows, width]."""
        return x[self.entry, self.heads, self.rows]

    def read(self, x: Tensor) -> Tensor:
        """Of [entries, groups, S, width], [heads or 1, keys, width]."""
        return x[self.entry, self.groups, self.keys]

    def map(self, q: Tensor, k: Tensor, sink: Tensor | None, buffer: Tensor) -> tuple[Tensor, ...]:
        """Softmax maps [heads, rows, keys], and the weights of the sinks [heads, rows, 1 or 0]."""
        q, k = self.of(q), self.read(k)
        count = k.shape[1]
        whole = _view(buffer, *q.shape[:2], count + (sink is not None))
        scores = _product(q, k.mT, self.scale, out=whole[..., :count])
        if self.added is not None:
            scores += self.added
        if self.near is not None:
            scores[..., count - self.near.shape[1] :] += self.near
        if sink is not None:
            whole[..., count:] = sink[self.entry, self.heads]
        empty = scores.amax(-1, keepdim=True) == -math.inf if self.void else None
        torch.softmax(whole, -1, out=whole)
        if empty is not None:
            scores.masked_fill_(empty, 0.0)
        return scores, whole[..., count:]


def _view(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _product(a: Tensor, b: Tensor, scale: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """The product of [heads, n, m] with [heads, m, p], or with the one [1, m, p] of all heads."""
    out = a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out
    total = _joined(out, b)
    torch.baddbmm(total, _joined(a, b), b, beta=0, alpha=scale, out=total)
    return out


def _add_product(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """Add a^T b of [heads, n, m] and [heads, n, p] to [heads, m, p], or their sum to [1, m, p]."""
    total.baddbmm_(_joined(a, total).mT, _joined(b, total), alpha=scale)


def _joined(x: Tensor, other: Tensor) -> Tensor:
    """Heads as further rows of one where the other has but one."""
    return x if len(x) == len(other) else x.flatten(0, 1)[None]


def _through_softmax(p: Tensor, d: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the scores, P (dP - delta), and delta = sum_j P dP [heads, rows, 1]."""
    torch.mul(p, d, out=out)
    delta = out.sum(-1, keepdim=True)
    return out.addcmul_(p, delta, value=-1), delta


class _Plan:
    """How a call is cut into blocks."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, window: int | None) -> None:
        (batch, heads, self.length), (groups, self.keys) = q.shape[1:4], k.shape[1:3]
        self.causal, self.window, self.device = causal, window, q.device
        reached = self.keys if window is None else min(self.keys, 2 * window + 256)
        row = reached * q.element_size()  # bytes
        # tall enough for fast products, low enough to skip most of what causal order hides
        height = min(256, max(64, self.length // 16), max(32, _BYTES // row))
        self.height = min(self.length, height)
        fitting = max(2, _BYTES // (self.height * row))
        # short sequences: the heads of all batch entries as those of one, at the price of a copy
        self.entries = 1 if fitting >= 2 * heads else batch
        self.heads, self.share = batch * heads // self.entries, heads // groups
        alike = self.heads if self.share == 1 else self.share  # heads that one product may serve
        self.count = max(n for n in range(1, min(alike, fitting) + 1) if alike % n == 0)
        self.size = self.count * self.height * (reached + 1)  # most entries of a block's map

    def of(self, x: Tensor | None) -> Any:
        """[..., B, heads, T, width] as [..., entries, heads, T, width]."""
        return None if x is None else x.reshape(*x.shape[:-4], self.entries, -1, *x.shape[-2:])

    def blocks(self, added: Tensor | None, scale: float) -> Iterator[_Block]:
        """All blocks; those of the same keys follow one another."""
        offset = self.keys - self.length
        position = {"causal": self.causal, "window": self.window}

        @functools.cache
        def near(height: int, width: int, ahead: int) -> Tensor | None:
            part = slice(0, height), slice(0, width)
            seen = band(*part, offset=ahead, **position, device=self.device)
            return None if seen is None else torch.where(seen, 0.0, -math.inf)

        for entry, first, start in itertools.product(
            range(self.entries),
            range(0, self.heads, self.count),
            range(0, self.length, self.height),
        ):
            rows = slice(start, min(start + self.height, self.length))
            seen = reach(rows, self.keys, offset=offset, **position)
            # in causal order alone, all rows see the keys up to the first row's position
            edge = max(seen.start, start + offset + 1 if self.window is None else 0)
            bias = block_of(added, rows, seen)
            if bias is not None:
                head = torch.arange(first, first + self.count, device=self.device)
                head += entry * self.heads
                bias = bias[head // bias.shape[1], head % bias.shape[1]]
            yield _Block(
                entry=entry,
                heads=slice(first, first + self.count),
                groups=slice(first // self.share, (first + self.count - 1) // self.share + 1),
                rows=rows,
                keys=seen,
                added=bias,
                near=near(rows.stop - start, seen.stop - edge, start + offset - edge),
                void=bias is not None or start + offset < 0,
                scale=scale,
            )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    added: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Output [r, B, N, T, E], of noise queries [1, B, N, T, D]."""
    plan = _Plan(q, k, causal, window)
    out = q.new_empty(*q.shape[:4], v.shape[3])
    outs, q, k, v, q_noise, k_noise, lam, sink, sink_noise = map(
        plan.of, (out, q, k, v, q_noise, k_noise, lam, sink, sink_noise)
    )
    sinks = [None] * len(q) if sink is None else sink
    sink_noise = None if sink_noise is None else sink_noise[0]
    noise_keys = k if k_noise is None else k_noise
    buffer, buffer_noise = q.new_empty(2, plan.size)
    with own_precision(q):
        for block in plan.blocks(added, scale):
            noise = None
            if q_noise is not None:
                noise, _ = block.map(q_noise[0], noise_keys, sink_noise, buffer_noise)
            for turn in range(len(q)):
                p, _ = block.map(q[turn], k, sinks[turn], buffer)
                if noise is not None and lam is not None:
                    p.addcmul_(noise, block.of(lam[turn]), value=-1)
                block.of(outs[turn]).copy_(_product(p, block.read(v)))
    return out


blocked_forward = operator(
    "blocked_forward",
    _forward,
    device=None,
    shapes=lambda q, k, v, *rest: q.new_empty(*q.shape[:4], v.shape[3]),
)


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_noise: Tensor | None,
    k_noise: Tensor | None,
    lam: Tensor | None,
    added: Tensor | None,
    sink: Tensor | None,
    sink_noise: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, q_noise, k_noise, lam, sink and sink_noise, empty for None.

    With P = P1 - lam P2: dv = P^T dO, d lam = -sum_j P2 dP, d sink = -p_sink sum_j P1 dP.
    """
    plan = _Plan(q, k, causal, window)
    given = (q, k, v, q_noise, k_noise, lam, sink, sink_noise)
    found = [q.new_zeros(0 if x is None else x.shape) for x in given]
    d_q, d_k, d_v, d_q_noise, d_k_noise, d_lam, d_sink, d_sink_noise = (
        plan.of(None if x is None else d) for x, d in zip(given, found, strict=True)
    )
    d_out, q, k, v, q_noise, k_noise, lam, sink, sink_noise = map(plan.of, (d_out, *given))
    sinks = [None] * len(q) if sink is None else sink
    sink_noise = None if sink_noise is None else sink_noise[0]
    noise_keys, d_noise_keys = (k, d_k) if k_noise is None else (k_noise, d_k_noise)
    buffer, buffer_noise, buffer_d, buffer_s = q.new_empty(4, plan.size)
    with own_precision(q):
        for block in plan.blocks(added, scale):
            noise = left = None
            if q_noise is not None:
                noise, left = block.map(q_noise[0], noise_keys, sink_noise, buffer_noise)
            for turn in range(len(q)):
                p, sunk = block.map(q[turn], k, sinks[turn], buffer)
                rows = block.of(d_out[turn])
                d = _product(rows, block.read(v).mT, out=_view(buffer_d, *p.shape))
                s, delta = _through_softmax(p, d, _view(buffer_s, *p.shape))
                block.of(d_q[turn]).copy_(_product(s, block.read(k), scale))
                _add_product(block.read(d_k), s, block.of(q[turn]), scale)
                if sink is not None:
                    d_sink[turn, block.entry, block.heads] -= (sunk * delta).sum(1, keepdim=True)
                if noise is None or left is None:
                    _add_product(block.read(d_v), p, rows)
                    continue
                assert q_noise is not None
                assert lam is not None
                factor = -block.of(lam[turn])
                _add_product(block.read(d_v), p.addcmul_(noise, factor), rows)
                s, delta = _through_softmax(noise, d, d)
                block.of(d_lam[turn]).copy_(-delta)
                block.of(d_q_noise[0]).add_(factor * _product(s, block.read(noise_keys), scale))
                _add_product(block.read(d_noise_keys), s, factor * block.of(q_noise[0]), scale)
                if sink_noise is not None:
                    lost = (factor * left * delta).sum(1, keepdim=True)
                    d_sink_noise[0, block.entry, block.heads] -= lost
    return found


def _gradient_shapes(d_out: Tensor, *inputs: Any) -> list[Tensor]:
    given = (*inputs[:6], *inputs[7:9])
    return [d_out.new_empty(0 if x is None else x.shape) for x in given]


blocked_backward = operator("blocked_backward", _backward, device=None, shapes=_gradient_shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = blocked_backward(d_out.contiguous(), *tensors, ctx.causal, ctx.window, ctx.scale)
    found = (*found[:6], None, *found[6:])  # none of the mask
    grads = (None if x is None else d for x, d in zip(tensors, found, strict=True))
    return *grads, None, None, None


differentiate("blocked_forward", _differentiate, _keep)
