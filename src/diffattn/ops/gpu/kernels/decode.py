"""Few queries behind many keys: chunks of keys side by side, then their sum."""

import triton
import triton.language as tl

from diffattn.ops.gpu.kernels.blocks import INTERPRETED, KEY, LENGTHS, LOG2E, put, tile
from diffattn.ops.gpu.kernels.forward import attend, difference


@triton.autotune(
    [
        triton.Config({"BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for n, warps, stages in (
            [(16, 1, 1)] if INTERPRETED.value else [(32, 4, 4), (64, 4, 3), (64, 8, 3)]
        )
    ],
    key=[*KEY, "BLOCK_M"],
)
@triton.jit(do_not_specialize=[*LENGTHS, "first_key", "chunk"])
def split_forward(
    q, k, v, q_noise, k_noise, mask, signal_out, noise_out, lse, lse_noise, q_b, q_t, q_h, k_b,
    k_s, k_g, v_b, v_s, v_g, q2_b, q2_t, q2_n, k2_b, k2_s, k2_g, mask_b, mask_h, mask_t, mask_s,
    T, S, H, N, G, window, reach, first_key, chunk, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    OWN_KEY: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A chunk of keys with the queries of all heads of its group, so that it is read once."""
    split = tl.program_id(0)
    b = (tl.program_id(2) // G).to(tl.int64)
    g = tl.program_id(2) % G
    of_block = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = of_block < T * (H // G)
    h = g * (H // G) + of_block // T
    n = h // (H // N)
    t = of_block % T
    row = t.to(tl.int64)
    lowest = first_key + split * chunk
    highest = tl.minimum(lowest + chunk, S)
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    signal, lse1, noise, lse2 = attend(
        tile(q + b * q_b, row * q_t + h * q_h, valid, D, BLOCK_D),
        tile(q_noise + b * q2_b, row * q2_t + n * q2_n, valid, D, BLOCK_D),
        *(k + b * k_b + g * k_g, k_noise + b * k2_b + g * k2_g, v + b * v_b + g * v_g),
        *(k_s, k2_s, v_s),
        *(mask + b * mask_b, row * mask_t + h * mask_h, mask_s),
        *(t + (S - T), t, t, valid, lowest, highest, S - T, S - 1),
        *(nothing, nothing, 0.0, highest, window, scale * LOG2E),
        *(CAUSAL, WINDOW, PACKED, MASK, OWN_KEY, PRECISION),
        *(D, E, BLOCK_D, BLOCK_E, BLOCK_M, BLOCK_N),
    )
    batches = tl.num_programs(2) // G
    at = ((split * batches + b) * H + h) * T + row
    put(signal_out, at * E, valid, signal, E, BLOCK_E)
    put(noise_out, at * E, valid, noise, E, BLOCK_E)
    tl.store(lse + at, lse1, mask=valid)
    tl.store(lse_noise + at, lse2, mask=valid)


@triton.jit
def _joined(
    parts, lse, at, of_split, sink, splits,
    E: tl.constexpr, SPLITS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Output of one map from those of its chunks, [1, BLOCK_E]."""
    split = tl.arange(0, SPLITS)
    there = split < splits
    rows = at + split.to(tl.int64) * of_split
    logs = tl.load(lse + rows, mask=there, other=float("-inf"))
    top = tl.maximum(tl.max(logs, 0), sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, 0) + tl.exp2(sink - base)
    total = tl.where(total == 0.0, 1.0, total)
    tiles = tile(parts, rows * E, there, E, BLOCK_E)
    return (tl.sum(tiles * weights[:, None], 0) / total)[None, :]


@triton.jit(do_not_specialize=["T", "splits"])
def join(
    signal_parts, noise_parts, lse, lse_noise, lam, sink, sink_noise, gain, out,
    T, H, N, rows, splits, eps, factor,
    SINK: tl.constexpr, NORM: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The difference of both maps for one query of one head, from the chunks of its keys."""
    at = tl.program_id(0).to(tl.int64)  # of [B, H, T]
    t = at % T
    h = at // T % H
    b = at // T // H
    sink1 = float("-inf")
    sink2 = float("-inf")
    if SINK:
        sink1 = tl.load(sink + h) * LOG2E
        sink2 = tl.load(sink_noise + h // (H // N)) * LOG2E
    signal = _joined(signal_parts, lse, at, rows, sink1, splits, E, SPLITS, BLOCK_E)
    noise = _joined(noise_parts, lse_noise, at, rows, sink2, splits, E, SPLITS, BLOCK_E)
    one = tl.zeros([1], tl.float32)
    lams = one + tl.load(lam + at)
    result = difference(signal, noise, lams, gain, eps, factor, NORM, E, BLOCK_E)
    put(out, one.to(tl.int64) + ((b * T + t) * H + h) * E, one == 0.0, result, E, BLOCK_E)
