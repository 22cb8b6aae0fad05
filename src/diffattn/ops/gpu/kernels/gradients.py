"""The gradients: dP = dO v^T is formed once for both maps."""

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
    query_range,
    scores,
    tile,
)


@triton.jit(do_not_specialize=["T"])
def sums(
    d_out, out, noise_out, lam, delta, delta_noise, T, H, N,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """sum_j P dP of both maps, [B, H, T]: dO . O1 and dO . O2, O1 = out + lam O2."""
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    n = h // (H // N)
    begin = tl.program_id(0) * BLOCK_M
    step = tl.arange(0, BLOCK_M)
    valid = begin + step < T
    head = ((b * T + begin) * H + h) * E
    grad = tile(d_out + head, step * H * E, valid, E, BLOCK_E).to(tl.float32)
    result = tile(out + head, step * H * E, valid, E, BLOCK_E).to(tl.float32)
    noise = tile(noise_out + ((b * T + begin) * N + n) * E, step * N * E, valid, E, BLOCK_E)
    at = (b * H + h) * T + begin
    lams = tl.load(lam + at + step, mask=valid, other=0.0)
    of_noise = tl.sum(grad * noise.to(tl.float32), 1)
    of_signal = tl.sum(grad * result, 1) + lams * of_noise
    tl.store(delta + at + step, of_signal, mask=valid)
    tl.store(delta_noise + at + step, of_noise, mask=valid)


@triton.jit
def _score_gradients(p, d_p, delta, added, EDGE: tl.constexpr):
    """P (dP - sum_j P dP); NaN of a hidden value does not pass."""
    found = p * (d_p - delta)
    if EDGE:
        found = tl.where(added == float("-inf"), 0.0, found)
    return found


@triton.autotune(
    configs((64, 64, 8, 2), (128, 32, 8, 3), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    key=KEY,
)
@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    q, k, v, q_noise, k_noise, lam, mask, doc_first, doc_end, d_out, lse, lse_noise, delta,
    delta_noise, d_q, d_q_noise, q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, q2_b, q2_t, q2_n,
    k2_b, k2_s, k2_g, mask_b, mask_h, mask_t, mask_s, T, S, H, N, G, window,
    reach, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    OWN_KEY: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d_q and d_q_noise of a block of queries of one noise head with its signal heads."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // N).to(tl.int64)
    n = tl.program_id(1) % N
    g = n // (N // G)
    begin = block * BLOCK_M
    far = begin.to(tl.int64)
    step = tl.arange(0, BLOCK_M)
    t = begin + step
    valid = t < T
    position = t + (S - T)
    low = t
    high = t
    lowest = 0
    highest = S
    if PACKED:
        low = tl.load(doc_first + b * T + t, mask=valid, other=S)
        high = tl.load(doc_end + b * T + t, mask=valid, other=0)
        lowest = tl.min(low, 0)
        highest = tl.max(high, 0)
    PARTLY: tl.constexpr = MASK or PACKED
    key_step = tl.arange(0, BLOCK_N)
    first, all_first, all_last, last = key_range(
        *(begin + S - T, tl.minimum(begin + BLOCK_M, T) - 1 + S - T),
        *(lowest, highest, window, CAUSAL, WINDOW, PARTLY, BLOCK_N),
    )
    k += b * k_b + g * k_g
    k_noise += b * k2_b + g * k2_g
    v += b * v_b + g * v_g
    q2 = tile(q_noise + b * q2_b + n * q2_n + far * q2_t, step * q2_t, valid, D, BLOCK_D)
    lse2 = tl.load(lse_noise + (b * N + n) * T + begin + step, mask=valid, other=float("inf"))
    d_q2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for h in range(n * (H // N), (n + 1) * (H // N)):
        q1 = tile(q + b * q_b + h * q_h + far * q_t, step * q_t, valid, D, BLOCK_D)
        grad = tile(d_out + ((b * T + begin) * H + h) * E, step * H * E, valid, E, BLOCK_E)
        at = (b * H + h) * T + begin
        lse1 = tl.load(lse + at + step, mask=valid, other=float("inf"))
        delta1 = tl.load(delta + at + step, mask=valid, other=0.0)
        delta2 = tl.load(delta_noise + at + step, mask=valid, other=0.0)
        lams = tl.load(lam + at + step, mask=valid, other=0.0)
        d_q1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        bias = mask + b * mask_b + h * mask_h + far * mask_t
        for part in tl.static_range(3):
            if part == 2 or (not PARTLY and (part == 1 or WINDOW)):
                start, stop = first, all_first
                if part == 1:
                    start, stop = all_first, all_last
                if part == 2:
                    start, stop = all_last, last
                for first_key in tl.range(start, stop, BLOCK_N):
                    key = first_key + key_step
                    away = tl.cast(first_key, tl.int64)
                    k1_tile = tile(k + away * k_s, key_step * k_s, key < S, D, BLOCK_D)
                    k2_tile = k1_tile
                    if OWN_KEY:
                        k2_tile = tile(k_noise + away * k2_s, key_step * k2_s, key < S, D, BLOCK_D)
                    v_tile = tile(v + away * v_s, key_step * v_s, key < S, E, BLOCK_E)
                    added = 0.0
                    if part != 1:
                        added = hiding(
                            *(position[:, None], key[None, :], low[:, None], high[:, None]),
                            bias
                            + away * mask_s
                            + (step * mask_t)[:, None]
                            + (key_step * mask_s)[None, :],
                            *(valid[:, None], S, window, CAUSAL, WINDOW, PACKED, MASK),
                        )
                        seen = tl.max(added, 0) > float("-inf")
                        k1_tile = tl.where(seen[:, None], k1_tile, 0.0)
                        k2_tile = tl.where(seen[:, None], k2_tile, 0.0)
                    d_p = product(grad, tl.trans(v_tile), None, PRECISION)
                    s1 = scores(q1, k1_tile, added, scale * LOG2E, part != 1, PRECISION)
                    p1 = tl.exp2(s1 - lse1[:, None])
                    d_s1 = _score_gradients(p1, d_p, delta1[:, None], added, part != 1)
                    d_q1 = product(d_s1.to(k1_tile.dtype), k1_tile, d_q1, PRECISION)
                    s2 = scores(q2, k2_tile, added, scale * LOG2E, part != 1, PRECISION)
                    p2 = tl.exp2(s2 - lse2[:, None]) * -lams[:, None]
                    d_s2 = _score_gradients(p2, d_p, delta2[:, None], added, part != 1)
                    d_q2 = product(d_s2.to(k2_tile.dtype), k2_tile, d_q2, PRECISION)
        put(d_q + ((b * T + begin) * H + h) * D, step * H * D, valid, d_q1 * scale, D, BLOCK_D)
    put(d_q_noise + ((b * T + begin) * N + n) * D, step * N * D, valid, d_q2 * scale, D, BLOCK_D)


@triton.autotune(
    configs((32, 64, 8, 2), (32, 128, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1)),
    key=KEY,
)
@triton.jit(do_not_specialize=LENGTHS)
def key_gradients(
    q, k, v, q_noise, k_noise, lam, mask, doc_first, doc_end, d_out, lse, lse_noise, delta,
    delta_noise, d_k, d_k_noise, d_v, q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, q2_b, q2_t,
    q2_n, k2_b, k2_s, k2_g, mask_b, mask_h, mask_t, mask_s, T, S, H, N, G,
    window, reach, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    OWN_KEY: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d_k, d_k_noise (OWN_KEY) and d_v of a block of keys of one group, over all its heads."""
    b = (tl.program_id(1) // G).to(tl.int64)
    g = tl.program_id(1) % G
    low_key = tl.program_id(0) * BLOCK_N
    high_key = tl.minimum(low_key + BLOCK_N, S) - 1
    key_step = tl.arange(0, BLOCK_N)
    key = low_key + key_step
    away = low_key.to(tl.int64)
    valid = key < S
    k1_tile = tile(k + b * k_b + g * k_g + away * k_s, key_step * k_s, valid, D, BLOCK_D)
    k2_tile = k1_tile
    if OWN_KEY:
        k2 = k_noise + b * k2_b + g * k2_g + away * k2_s
        k2_tile = tile(k2, key_step * k2_s, valid, D, BLOCK_D)
    v_tile = tile(v + b * v_b + g * v_g + away * v_s, key_step * v_s, valid, E, BLOCK_E)
    shift = S - T
    lowest = 0
    highest = T
    if PACKED:
        lowest = tl.load(doc_first + b * T + low_key)
        highest = tl.load(doc_end + b * T + high_key)
    PARTLY: tl.constexpr = MASK or PACKED
    first, all_first, all_last, last = query_range(
        *(low_key, high_key, lowest, highest, T, shift, window),
        *(CAUSAL, WINDOW, PARTLY, BLOCK_M),
    )
    step = tl.arange(0, BLOCK_M)
    d_k1 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_k2 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_values = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        n = h // (H // N)
        q1 = q + b * q_b + h * q_h
        q2 = q_noise + b * q2_b + n * q2_n
        grads = d_out + (b * T * H + h) * E
        rows = (b * H + h) * T
        noise_rows = (b * N + n) * T
        bias = mask + b * mask_b + h * mask_h + away * mask_s
        for part in tl.static_range(3):
            if (part == 0 and (CAUSAL or WINDOW or PARTLY)) or (
                not PARTLY and (part == 1 or WINDOW)
            ):
                start, stop = first, all_first
                if part == 1:
                    start, stop = all_first, all_last
                if part == 2:
                    start, stop = all_last, last
                for begin in tl.range(start, stop, BLOCK_M):
                    t = begin + step
                    there = t < T
                    far = tl.cast(begin, tl.int64)
                    q1_tile = tile(q1 + far * q_t, step * q_t, there, D, BLOCK_D)
                    q2_tile = tile(q2 + far * q2_t, step * q2_t, there, D, BLOCK_D)
                    grad = tile(grads + far * H * E, step * H * E, there, E, BLOCK_E)
                    at = rows + begin
                    lse1 = tl.load(lse + at + step, mask=there, other=float("inf"))
                    lse2 = tl.load(
                        lse_noise + noise_rows + begin + step, mask=there, other=float("inf")
                    )
                    delta1 = tl.load(delta + at + step, mask=there, other=0.0)
                    delta2 = tl.load(delta_noise + at + step, mask=there, other=0.0)
                    lams = tl.load(lam + at + step, mask=there, other=0.0)
                    added = 0.0
                    if part != 1:
                        low = t
                        high = t
                        if PACKED:
                            low = tl.load(doc_first + b * T + t, mask=there, other=S)
                            high = tl.load(doc_end + b * T + t, mask=there, other=0)
                        added = hiding(
                            *((t + shift)[None, :], key[:, None], low[None, :], high[None, :]),
                            bias
                            + far * mask_t
                            + (step * mask_t)[None, :]
                            + (key_step * mask_s)[:, None],
                            *(there[None, :], S, window, CAUSAL, WINDOW, PACKED, MASK),
                        )
                    d_p = product(v_tile, tl.trans(grad), None, PRECISION)
                    s1 = scores(k1_tile, q1_tile, added, scale * LOG2E, part != 1, PRECISION)
                    p1 = tl.exp2(s1 - lse1[None, :])
                    d_s1 = _score_gradients(p1, d_p, delta1[None, :], added, part != 1)
                    d_k1 = product(d_s1.to(q1_tile.dtype), q1_tile, d_k1, PRECISION)
                    s2 = scores(k2_tile, q2_tile, added, scale * LOG2E, part != 1, PRECISION)
                    p2 = tl.exp2(s2 - lse2[None, :]) * -lams[None, :]
                    d_s2 = _score_gradients(p2, d_p, delta2[None, :], added, part != 1)
                    d_s2 = d_s2.to(q2_tile.dtype)
                    if OWN_KEY:
                        d_k2 = product(d_s2, q2_tile, d_k2, PRECISION)
                    else:
                        d_k1 = product(d_s2, q2_tile, d_k1, PRECISION)
                    p = (p1 + p2).to(grad.dtype)
                    d_values = product(p, grad, d_values, PRECISION)
    of_group = (b * S + low_key) * G + g
    put(d_k + of_group * D, key_step * G * D, valid, d_k1 * scale, D, BLOCK_D)
    if OWN_KEY:
        put(d_k_noise + of_group * D, key_step * G * D, valid, d_k2 * scale, D, BLOCK_D)
    put(d_v + of_group * E, key_step * G * E, valid, d_values, E, BLOCK_E)
