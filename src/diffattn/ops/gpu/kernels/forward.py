"""The forward kernel: online softmax of both maps, two accumulators, one reading of v."""

import triton
import triton.language as tl

from diffattn.ops.gpu.kernels.blocks import (
    KEY,
    LENGTHS,
    LOG2E,
    configs,
    hiding,
    key_range,
    product,
    put,
    scores,
    tile,
)


@triton.jit
def fold(acc, top, total, found, v, PRECISION: tl.constexpr):
    """One block of keys more in the online softmax of one map."""
    new = tl.maximum(top, tl.max(found, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(found - base[:, None])
    shrink = tl.exp2(top - base)
    acc = product(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return acc, new, total * shrink + tl.sum(p, 1)


@triton.jit
def _finish(acc, top, total):
    """Output and log-sum-exp of one map; zeros and -inf for a row that sees nothing."""
    total = tl.where(top == float("-inf"), 1.0, total)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def difference(
    signal, noise, lam, gain, eps, factor,
    NORM: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Signal minus lam times noise; with NORM its RMS norm, times gain and factor."""
    out = signal - lam[:, None] * noise
    if NORM:
        columns = tl.arange(0, BLOCK_E)
        square = tl.sum(out * out, 1) / E
        weight = tl.load(gain + columns, mask=columns < E, other=0.0).to(tl.float32) * factor
        out = out * tl.rsqrt(square + eps)[:, None] * weight[None, :]
    return out


@triton.jit
def attend(
    q1, q2, k, k_noise, v, k_s, k2_s, v_s, mask, mask_rows, mask_s, position, low, high, inside,
    lowest, highest, first_position, last_position, top1, top2, first_total, S, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    OWN_KEY: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of both maps for the rows of one program."""
    acc1 = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total1 = tl.zeros([BLOCK_M], tl.float32) + first_total
    total2 = total1
    PARTLY: tl.constexpr = MASK or PACKED
    step = tl.arange(0, BLOCK_N)
    first, all_first, all_last, last = key_range(
        *(first_position, last_position, lowest, highest, window),
        *(CAUSAL, WINDOW, PARTLY, BLOCK_N),
    )
    for part in tl.static_range(3):  # left edge, seen entirely, right edge
        if part == 2 or (not PARTLY and (part == 1 or WINDOW)):
            start, stop = first, all_first
            if part == 1:
                start, stop = all_first, all_last
            if part == 2:
                start, stop = all_last, last
            for block in tl.range(start, stop, BLOCK_N):
                key = block + step
                valid = key < S
                far = tl.cast(block, tl.int64)
                k1_tile = tile(k + far * k_s, step * k_s, valid, D, BLOCK_D)
                k2_tile = k1_tile
                if OWN_KEY:
                    k2_tile = tile(k_noise + far * k2_s, step * k2_s, valid, D, BLOCK_D)
                v_tile = tile(v + far * v_s, step * v_s, valid, E, BLOCK_E)
                added = 0.0
                if part != 1:
                    added = hiding(
                        *(position[:, None], key[None, :], low[:, None], high[:, None]),
                        mask + far * mask_s + mask_rows[:, None] + (step * mask_s)[None, :],
                        *(inside[:, None], S, window, CAUSAL, WINDOW, PACKED, MASK),
                    )
                    seen = tl.max(added, 0) > float("-inf")
                    v_tile = tl.where(seen[:, None], v_tile, 0.0)
                s1 = scores(q1, k1_tile, added, scale, part != 1, PRECISION)
                acc1, top1, total1 = fold(acc1, top1, total1, s1, v_tile, PRECISION)
                s2 = scores(q2, k2_tile, added, scale, part != 1, PRECISION)
                acc2, top2, total2 = fold(acc2, top2, total2, s2, v_tile, PRECISION)
    signal, lse1 = _finish(acc1, top1, total1)
    noise, lse2 = _finish(acc2, top2, total2)
    return signal, lse1, noise, lse2


@triton.autotune(
    configs((128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 8, 2)),
    key=KEY,
)
@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q, k, v, q_noise, k_noise, lam, mask, sink, sink_noise, doc_first, doc_end, gain, out,
    noise_out, lse, lse_noise, q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, q2_b, q2_t, q2_n,
    k2_b, k2_s, k2_g, mask_b, mask_h, mask_t, mask_s, T, S, H, N, G, window,
    reach, scale, eps, factor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    OWN_KEY: tl.constexpr, SINK: tl.constexpr,
    NORM: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of queries of one signal head: out, and with SAVE what the gradients need."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows of a causal map first
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    n = h // (H // N)
    g = h // (H // G)
    begin = block * BLOCK_M
    far = begin.to(tl.int64)
    step = tl.arange(0, BLOCK_M)
    t = begin + step
    valid = t < T
    low = t
    high = t
    lowest = 0
    highest = S
    if PACKED:
        low = tl.load(doc_first + b * T + t, mask=valid, other=S)
        high = tl.load(doc_end + b * T + t, mask=valid, other=0)
        lowest = tl.min(low, 0)
        highest = tl.max(high, 0)
    top1 = tl.full([BLOCK_M], float("-inf"), tl.float32)
    top2 = top1
    first_total = 0.0
    if SINK:
        top1 = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink + h) * LOG2E
        top2 = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_noise + n) * LOG2E
        first_total = 1.0
    signal, lse1, noise, lse2 = attend(
        tile(q + b * q_b + h * q_h + far * q_t, step * q_t, valid, D, BLOCK_D),
        tile(q_noise + b * q2_b + n * q2_n + far * q2_t, step * q2_t, valid, D, BLOCK_D),
        *(k + b * k_b + g * k_g, k_noise + b * k2_b + g * k2_g, v + b * v_b + g * v_g),
        *(k_s, k2_s, v_s),
        *(mask + b * mask_b + h * mask_h + far * mask_t, step * mask_t, mask_s),
        *(t + (S - T), low, high, valid, lowest, highest),
        *(begin + S - T, tl.minimum(begin + BLOCK_M, T) - 1 + S - T),
        *(top1, top2, first_total, S, window, scale * LOG2E),
        *(CAUSAL, WINDOW, PACKED, MASK, OWN_KEY, PRECISION),
        *(D, E, BLOCK_D, BLOCK_E, BLOCK_M, BLOCK_N),
    )
    at = (b * H + h) * T + begin
    lams = tl.load(lam + at + step, mask=valid, other=0.0)
    result = difference(signal, noise, lams, gain, eps, factor, NORM, E, BLOCK_E)
    put(out + ((b * T + begin) * H + h) * E, step * H * E, valid, result, E, BLOCK_E)
    if SAVE:
        # a row that sees nothing has weights exp2(-inf - inf) = 0
        lse1 = tl.where(lse1 == float("-inf"), float("inf"), lse1)
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
        tl.store(lse + at + step, lse1, mask=valid)
        own = valid & (h % (H // N) == 0)  # of the heads that share a noise head, the first
        tl.store(lse_noise + (b * N + n) * T + begin + step, lse2, mask=own)
        put(noise_out + ((b * T + begin) * N + n) * E, step * N * E, own, noise, E, BLOCK_E)
