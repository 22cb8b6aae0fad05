"""Attention by plain operations of torch, complete rows of scores at a time, on any device.

A block of query rows meets all of its keys: both maps are normalised and subtracted before the one
product with v. The backward pass makes both maps again and forms dP = dO v^T once for both.

Axis letters: b noise heads of all batch entries (heads, without noise), r signal heads of each,
g key/value heads of all batch entries, T, S lengths, D, E widths.
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
from diffattn.ops.scoring import Scoring

# of a block: rows, which causal order makes see what they need not, and bytes of a map
_ROWS, _SHARE, _BYTES = 128, 8, 8 << 20


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
    causal, window = scoring.causal, scoring.window
    work, batch = torch.promote_types(q.dtype, torch.float32), q.shape[0]
    heads = q.shape[2] if q_noise is None else q_noise.shape[2]
    added, used = added_and_used(scoring.mask, q.shape[1], k.shape[1], causal=causal, window=window)

    def alone(x: Tensor | None) -> Tensor | None:  # [B, S, heads, width] as [g or b, S, width]
        return None if x is None else x.to(work).transpose(1, 2).flatten(0, 1).contiguous()

    def in_turn(x: Tensor | None) -> Tensor | None:  # [B, T, b r, width] as [r, b, T, width]
        if x is None:
            return None
        x = x.to(work).unflatten(2, (heads, -1)).permute(3, 0, 2, 1, 4)
        return x.flatten(1, 2).contiguous()

    sink, sink_noise = (None if x is None else x.to(work) for x in sinks)
    out = blocked_forward(
        in_turn(q),
        *(alone(blank_unseen(x, used)) for x in (k, v)),
        alone(q_noise),
        None if k_noise is None else alone(blank_unseen(k_noise, used)),
        in_turn(None if lam is None else lam[..., None]),
        None if added is None else added.to(work).expand(batch, heads, -1, -1),
        None if sink is None else sink.view(heads, -1, 1).transpose(0, 1).repeat(1, batch, 1),
        None if sink_noise is None else sink_noise[:, None].repeat(batch, 1),
        causal,
        window,
        scoring.factor(q.shape[-1]),
    )
    out = out.unflatten(1, (batch, heads)).permute(1, 3, 2, 0, 4).flatten(2, 3)
    return out.to(q.dtype)


class _Block(NamedTuple):
    """The part of a call whose maps are made at once."""

    heads: slice  # of b
    groups: slice  # of g: as many, or one for all heads
    rows: slice
    keys: slice
    added: Tensor | None  # to the scores, broadcastable to [heads, rows, keys]
    near: Tensor | None  # the same by position, [rows, the last of the keys]
    void: bool  # whether a row may see nothing
    scale: float

    def of(self, x: Tensor) -> Tensor:
        """Of [b, T, width], [heads, rows, width]."""
        return x[self.heads, self.rows]

    def read(self, x: Tensor) -> Tensor:
        """Of [g, S, width], [heads or 1, keys, width]."""
        return x[self.groups, self.keys]

    def map(
        self, q: Tensor, k: Tensor, sink: Tensor | None, buffer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Softmax maps [heads, rows, keys], and the weights of the sinks [heads, rows, 1 or 0]."""
        q, k = self.of(q), self.read(k)
        count = k.shape[1]
        whole = _view(buffer, *q.shape[:2], count + (sink is not None))
        scores = whole[..., :count]
        _product(q, k.mT, self.scale, out=scores)
        if self.added is not None:
            scores += self.added
        if self.near is not None:
            scores[..., count - self.near.shape[1] :] += self.near
        if sink is not None:
            whole[..., count:] = sink[self.heads, None]
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


def _blocks(
    q: Tensor, k: Tensor, added: Tensor | None, causal: bool, window: int | None, scale: float
) -> tuple[int, Iterator[_Block]]:
    """Most entries of a block's map, and all blocks; those of the same keys follow one another."""
    heads, length, groups, keys = *q.shape[1:3], *k.shape[:2]
    share, offset = heads // groups, keys - length
    height = min(length, max(32, min(_ROWS, length // _SHARE)))
    reached = keys if window is None else min(keys, 2 * window + height)
    alike = heads if share == 1 else share  # heads that one product may serve
    fitting = _BYTES // (height * reached * q.element_size())
    count = max(n for n in range(1, alike + 1) if alike % n == 0 and (n == 1 or n <= fitting))

    @functools.cache
    def near(height: int, width: int, position: int) -> Tensor | None:
        """To add by position; the first row stands `position` keys behind the first key."""
        part = slice(0, height), slice(0, width)
        seen = band(*part, offset=position, causal=causal, window=window, device=q.device)
        return None if seen is None else q.new_zeros(()).masked_fill(~seen, -math.inf)

    def blocks() -> Iterator[_Block]:
        for first, start in itertools.product(range(0, heads, count), range(0, length, height)):
            rows, part = slice(start, min(start + height, length)), slice(first, first + count)
            seen = reach(rows, keys, offset=offset, causal=causal, window=window)
            # in causal order alone, all rows see the keys up to the first row's position
            edge = slice(max(seen.start, start + offset + 1 if window is None else 0), seen.stop)
            bias = block_of(added, rows, seen)
            if bias is not None:
                head = torch.arange(part.start, part.stop, device=q.device)
                bias = bias[head // bias.shape[1], head % bias.shape[1]]
            yield _Block(
                heads=part,
                groups=slice(first // share, (part.stop - 1) // share + 1),
                rows=rows,
                keys=seen,
                added=bias,
                near=near(
                    rows.stop - rows.start, edge.stop - edge.start, start + offset - edge.start
                ),
                void=bias is not None or start + offset < 0,
                scale=scale,
            )

    return count * height * (reached + 1), blocks()


@torch.library.custom_op("diffattn::blocked_forward", mutates_args=())
def blocked_forward(
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
    """Output [r, b, T, E] of q [r, b, T, D], k, v [g, S, ...], q_noise [b, T, D], lam [r, b, T, 1],
    sink [r, b, 1], sink_noise [b, 1] and `added` [B, N, T or 1, S or 1]."""
    noise_keys = k if k_noise is None else k_noise
    out = q.new_empty(*q.shape[:3], v.shape[2])
    size, blocks = _blocks(q, k, added, causal, window, scale)
    buffer, buffer_noise = q.new_empty(2, size)
    with own_precision(q):
        for block in blocks:
            noise = None
            if q_noise is not None:
                noise, _ = block.map(q_noise, noise_keys, sink_noise, buffer_noise)
            for turn in range(len(q)):
                p, _ = block.map(q[turn], k, None if sink is None else sink[turn], buffer)
                if noise is not None and lam is not None:
                    p.addcmul_(noise, block.of(lam[turn]), value=-1)
                block.of(out[turn]).copy_(_product(p, block.read(v)))
    return out


@blocked_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[2])


@torch.library.custom_op("diffattn::blocked_backward", mutates_args=())
def blocked_backward(
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
    given = (q, k, v, q_noise, k_noise, lam, sink, sink_noise)
    found = [q.new_zeros(0 if x is None else x.shape) for x in given]
    d_q, d_k, d_v, d_q_noise, d_k_noise, d_lam, d_sink, d_sink_noise = found
    noise_keys, d_noise_keys = (k, d_k) if k_noise is None else (k_noise, d_k_noise)
    size, blocks = _blocks(q, k, added, causal, window, scale)
    buffer, buffer_noise, buffer_d, buffer_s = q.new_empty(4, size)
    with own_precision(q):
        for block in blocks:
            noise = sunk_noise = None
            if q_noise is not None:
                noise, sunk_noise = block.map(q_noise, noise_keys, sink_noise, buffer_noise)
            for turn in range(len(q)):
                p, sunk = block.map(q[turn], k, None if sink is None else sink[turn], buffer)
                rows = block.of(d_out[turn])
                d = _product(rows, block.read(v).mT, out=_view(buffer_d, *p.shape))
                s, delta = _through_softmax(p, d, _view(buffer_s, *p.shape))
                block.of(d_q[turn]).copy_(_product(s, block.read(k), scale))
                _add_product(block.read(d_k), s, block.of(q[turn]), scale)
                if sink is not None:
                    d_sink[turn, block.heads] -= (sunk * delta).sum(1)
                if noise is None or sunk_noise is None or q_noise is None or lam is None:
                    _add_product(block.read(d_v), p, rows)
                    continue
                factor = -block.of(lam[turn])
                _add_product(block.read(d_v), p.addcmul_(noise, factor), rows)
                s, delta = _through_softmax(noise, d, d)
                block.of(d_lam[turn]).copy_(-delta)
                block.of(d_q_noise).add_(factor * _product(s, block.read(noise_keys), scale))
                _add_product(block.read(d_noise_keys), s, factor * block.of(q_noise), scale)
                if sink_noise is not None:
                    d_sink_noise[block.heads] -= (factor * sunk_noise * delta).sum(1)
    return found


@blocked_backward.register_fake
def _(d_out: Tensor, *inputs: Any) -> list[Tensor]:
    given = (*inputs[:6], *inputs[7:9])
    return [d_out.new_empty(0 if x is None else x.shape) for x in given]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = blocked_backward(d_out.contiguous(), *tensors, ctx.causal, ctx.window, ctx.scale)
    found = (*found[:6], None, *found[6:])  # none of the mask
    grads = (None if x is None else d for x, d in zip(tensors, found, strict=True))
    return *grads, None, None, None


blocked_forward.register_autograd(_differentiate, setup_context=_keep)
