"""Attention by plain operations of torch, complete rows of scores at a time, on any device.

A block of query rows meets all of its keys: both maps are normalised and subtracted before the one
product with v. The backward pass makes both maps again and forms dP = dO v^T once for both.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffattn.ops.masks import added_and_used, band, blank_unseen, block_of, reach
from diffattn.ops.precision import own_precision
from diffattn.ops.scoring import Scoring

# of a block: rows few enough that its maps stay in cache, with heads enough for every thread
_ROWS, _LEAST_ROWS, _HEADS, _BYTES = 128, 32, 4, 2 << 20


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
    work, factor = torch.promote_types(q.dtype, torch.float32), scoring.factor(q.shape[-1])
    causal, window = scoring.causal, scoring.window
    added, used = added_and_used(scoring.mask, q.shape[1], k.shape[1], causal=causal, window=window)
    out = blocked_forward(
        q.to(work) * factor,
        *(blank_unseen(tensor, used).to(work) for tensor in (k, v)),
        None if q_noise is None else q_noise.to(work) * factor,
        None if k_noise is None else blank_unseen(k_noise, used).to(work),
        lam,
        *(None if tensor is None else tensor.to(work) for tensor in (added, *sinks)),
        causal,
        window,
    )
    return out.to(q.dtype)


class _Block(NamedTuple):
    """Some noise heads (heads, where there is no noise) of one batch entry, rows and keys."""

    batch: int
    heads: slice
    groups: slice  # as many as heads, or one for all of them
    rows: slice
    keys: slice
    added: Tensor | None  # to the scores, broadcastable to [heads, rows, keys]
    hidden: Tensor | None  # by position, [rows, the last of the keys]
    void: bool  # whether a row may see nothing

    def of(self, x: Tensor) -> Tensor:
        """Of rows [B, N, T, width] those of the block, [heads, rows, width]."""
        return x[self.batch, self.heads, self.rows]

    def read(self, x: Tensor) -> Tensor:
        """Of keys [B, S, G, width] those of the block, [groups, keys, width]."""
        return x[self.batch, self.keys, self.groups].transpose(0, 1)

    def map(
        self, q: Tensor, k: Tensor, sink: Tensor | None, buffer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Softmax maps [heads, rows, keys], and the weights of the sinks [heads, rows, 1 or 0]."""
        heads, rows, count = *self.of(q).shape[:2], _size(self.keys)
        whole = _view(buffer, heads, rows, count + (sink is not None))
        scores = whole[..., :count]
        _product(self.of(q), self.read(k).mT, scores)
        if self.added is not None:
            scores += self.added
        if self.hidden is not None:
            scores[..., count - self.hidden.shape[1] :].masked_fill_(self.hidden, float("-inf"))
        if sink is not None:
            whole[..., count] = sink[self.heads, None]
        empty = scores.amax(-1, keepdim=True) == float("-inf") if self.void else None
        torch.softmax(whole, -1, out=whole)
        if empty is not None:
            scores.masked_fill_(empty, 0.0)
        return scores, whole[..., count:]


def _size(part: slice) -> int:
    return part.stop - part.start


def _view(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of [heads, n, m] with [heads or 1, m, p]."""
    return torch.bmm(a, b.expand(len(a), -1, -1), out=out)


def _add_outer(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b of [heads, n, m] and [heads, n, p] to [heads or 1, m, p]."""
    for n in range(len(a)):
        total[n % len(total)].addmm_(a[n].T, b[n])


def _turn(x: Tensor, heads: int, turn: int = 0) -> Tensor:
    """Of [B, T, heads * turns, width] every head that has its turn, [B, heads, T, width]."""
    return x.unflatten(2, (heads, -1))[:, :, :, turn].transpose(1, 2)


def _sinks(sink: Tensor | None, heads: int, turn: int) -> Tensor | None:
    return None if sink is None else sink.view(heads, -1)[:, turn]


def _through_softmax(p: Tensor, d: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the scores, P (dP - delta), and delta = sum_j P dP [heads, rows, 1]."""
    torch.mul(p, d, out=out)
    delta = out.sum(-1, keepdim=True)
    return out.addcmul_(p, delta, value=-1), delta


def _blocks(
    q: Tensor, k: Tensor, heads: int, added: Tensor | None, causal: bool, window: int | None
) -> tuple[int, Iterator[_Block]]:
    """Most entries of a map, and all blocks; those of the same keys follow one another."""
    length, keys, groups = q.shape[1], *k.shape[1:3]
    share, least = heads // groups, min(length, _LEAST_ROWS)
    reached = keys if window is None else min(keys, 2 * window + _ROWS)
    fitting = _BYTES // (reached * q.element_size())  # rows of maps
    alike = heads if share == 1 else share  # heads that one product may serve
    bound = min(_HEADS, max(1, fitting // least))
    count = max(n for n in range(1, alike + 1) if alike % n == 0 and n <= bound)
    height = min(length, max(least, min(_ROWS, fitting // count // least * least)))

    def blocks() -> Iterator[_Block]:
        offset = keys - length
        for b, first, start in itertools.product(
            range(len(q)), range(0, heads, count), range(0, length, height)
        ):
            rows, part = slice(start, min(start + height, length)), slice(first, first + count)
            seen = reach(rows, keys, offset=offset, causal=causal, window=window)
            # in causal order alone, all rows see the keys up to the first row's position
            edge = slice(max(seen.start, start + offset + 1 if window is None else 0), seen.stop)
            near = band(rows, edge, offset=offset, causal=causal, window=window, device=q.device)
            bias = block_of(added, rows, seen)
            bias = None if bias is None else bias[b if len(bias) > 1 else 0]
            yield _Block(
                batch=b,
                heads=part,
                groups=slice(first // share, (part.stop - 1) // share + 1),
                rows=rows,
                keys=seen,
                added=bias if bias is None or len(bias) == 1 else bias[part],
                hidden=None if near is None else ~near,
                void=bias is not None or start + offset < 0,
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
) -> Tensor:
    """Output [B, T, H, E] of scaled queries."""
    heads = (q if q_noise is None else q_noise).shape[2]
    noise_keys = k if k_noise is None else k_noise
    out = q.new_empty(*q.shape[:3], v.shape[3])
    size, blocks = _blocks(q, k, heads, added, causal, window)
    buffer, buffer_noise = q.new_empty(2, size)
    with own_precision(q):
        for block in blocks:
            noise = None
            if q_noise is not None:
                noise, _ = block.map(_turn(q_noise, heads), noise_keys, sink_noise, buffer_noise)
            for turn in range(q.shape[2] // heads):
                p, _ = block.map(_turn(q, heads, turn), k, _sinks(sink, heads, turn), buffer)
                if noise is not None and lam is not None:
                    p.addcmul_(noise, block.of(_turn(lam[..., None], heads, turn)), value=-1)
                block.of(_turn(out, heads, turn)).copy_(_product(p, block.read(v)))
    return out


@blocked_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


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
) -> list[Tensor]:
    """Gradients of q, k, v, q_noise, k_noise, lam, sink and sink_noise, empty for None.

    With P = P1 - lam P2: dv = P^T dO, d lam = -sum_j P2 dP, d sink = -p_sink sum_j P1 dP.
    """
    heads = (q if q_noise is None else q_noise).shape[2]
    given = (q, k, v, q_noise, k_noise, lam, sink, sink_noise)
    found = [q.new_zeros(0 if x is None else x.shape) for x in given]
    d_q, d_k, d_v, d_q_noise, d_k_noise, d_lam, d_sink, d_sink_noise = found
    noise_keys, d_noise_keys = (k, d_k) if k_noise is None else (k_noise, d_k_noise)
    size, blocks = _blocks(q, k, heads, added, causal, window)
    buffer, buffer_noise, buffer_d, buffer_s = q.new_empty(4, size)
    with own_precision(q):
        for block in blocks:
            noise = sunk_noise = None
            if q_noise is not None:
                noise, sunk_noise = block.map(
                    _turn(q_noise, heads), noise_keys, sink_noise, buffer_noise
                )
            for turn in range(q.shape[2] // heads):
                p, sunk = block.map(_turn(q, heads, turn), k, _sinks(sink, heads, turn), buffer)
                rows = block.of(_turn(d_out, heads, turn))
                d = _product(rows, block.read(v).mT, _view(buffer_d, *p.shape))
                s, delta = _through_softmax(p, d, _view(buffer_s, *p.shape))
                block.of(_turn(d_q, heads, turn)).copy_(_product(s, block.read(k)))
                _add_outer(block.read(d_k), s, block.of(_turn(q, heads, turn)))
                if sink is not None:
                    d_sink.view(heads, -1)[block.heads, turn] -= (sunk * delta).sum((1, 2))
                if noise is None or q_noise is None or lam is None:
                    _add_outer(block.read(d_v), p, rows)
                    continue
                factor = -block.of(_turn(lam[..., None], heads, turn))
                _add_outer(block.read(d_v), p.addcmul_(noise, factor), rows)
                s, delta = _through_softmax(noise, d, d)
                block.of(_turn(d_lam[..., None], heads, turn)).copy_(-delta)
                block.of(_turn(d_q_noise, heads)).add_(factor * _product(s, block.read(noise_keys)))
                _add_outer(
                    block.read(d_noise_keys), s, factor * block.of(_turn(q_noise, heads))
                )
                if sink_noise is not None:
                    d_sink_noise[block.heads] -= (factor * sunk_noise * delta).sum((1, 2))
    return found


@blocked_backward.register_fake
def _(d_out: Tensor, *inputs: Any) -> list[Tensor]:
    q, given = inputs[0], (*inputs[:6], *inputs[7:9])
    return [q.new_empty(0 if x is None else x.shape) for x in given]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = blocked_backward(d_out, *tensors, ctx.causal, ctx.window)
    found = [*found[:6], None, *found[6:]]  # none of the mask
    return *(None if x is None else d for x, d in zip(tensors, found, strict=True)), None, None


blocked_forward.register_autograd(_differentiate, setup_context=_keep)
