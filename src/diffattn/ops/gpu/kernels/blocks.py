"""What all kernels share: block sizes, tiles of memory, which keys a row sees, scores."""

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LENGTHS = ["T", "S", "window", "reach"]  # no new kernel for each of their values
# `reach` is a class of lengths, which nothing but the choice of block sizes reads
KEY = ["D", "E", "reach", "CAUSAL", "WINDOW", "PACKED", "MASK"]


def configs(*choices: tuple[int, int, int, int]) -> list[triton.Config]:
    """From (queries, keys of a block, warps, stages); the interpreter takes small blocks."""
    if INTERPRETED.value:
        choices = ((32, 16, 1, 1),)
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in choices
    ]


@triton.jit
def tile(pointer, offsets, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a matrix, [rows, BLOCK]; zeros where not valid and beyond WIDTH columns."""
    columns = tl.arange(0, BLOCK)
    inside = valid[:, None]
    if WIDTH < BLOCK:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(pointer + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def put(pointer, offsets, valid, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of a matrix in the dtype of its memory."""
    columns = tl.arange(0, BLOCK)
    inside = valid[:, None] & (columns < WIDTH)[None, :]
    at = pointer + offsets[:, None] + columns[None, :]
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def hiding(
    position, key, low, high, bias, inside, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """What is added to scores: 0 or the mask where a key is seen, else -inf.

    `key` has the axis of keys, `position`, `low` and `high` that of queries, in either order;
    `bias` are the addresses of the mask.
    """
    distance = position - key
    seen = (key < S) & (distance == distance)
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW:
        seen = seen & (distance < window)
        if not CAUSAL:
            seen = seen & (distance > -window)
    if PACKED:
        seen = seen & (key >= low) & (key < high)
    if MASK:
        return tl.load(bias, mask=seen & inside, other=float("-inf")) * LOG2E
    return tl.where(seen, 0.0, float("-inf"))


@triton.jit
def key_range(
    first_position, last_position, lowest, highest, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PARTLY: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where blocks of keys start: first, first and last that all rows see entirely, last."""
    first = lowest
    last = highest
    all_first = lowest
    all_last = highest
    if CAUSAL:
        last = tl.minimum(last, last_position + 1)
        all_last = tl.minimum(all_last, first_position + 1)
    if WINDOW:
        first = tl.maximum(first, first_position - window + 1)
        all_first = tl.maximum(all_first, last_position - window + 1)
        if not CAUSAL:
            last = tl.minimum(last, last_position + window)
            all_last = tl.minimum(all_last, first_position + window)
    first = first // BLOCK_N * BLOCK_N
    last = tl.maximum(last, first)
    if PARTLY:
        return first, first, first, last
    stop = tl.cdiv(last, BLOCK_N) * BLOCK_N
    all_first = tl.minimum(tl.cdiv(all_first, BLOCK_N) * BLOCK_N, stop)
    all_last = tl.maximum(tl.maximum(all_last, 0) // BLOCK_N * BLOCK_N, all_first)
    return first, all_first, all_last, last


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """The sum acc + a b in fp32; the interpreter, which has no bf16, widens the factors."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def scores(rows, columns, added, scale, EDGE: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of one map; NaN of a hidden key does not pass."""
    scores = product(rows, tl.trans(columns), None, PRECISION) * scale
    if EDGE:
        scores = tl.where(added == float("-inf"), float("-inf"), scores + added)
    return scores


@triton.jit
def query_range(
    low_key, high_key, first, last, T, shift, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PARTLY: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same for the queries of a block of keys; queries beyond T weigh nothing."""
    all_first = 0
    all_last = T
    if CAUSAL:
        first = tl.maximum(first, low_key - shift)
        all_first = tl.maximum(all_first, high_key - shift)
    if WINDOW:
        last = tl.minimum(last, high_key + window - shift)
        all_last = tl.minimum(all_last, low_key + window - shift)
        if not CAUSAL:
            first = tl.maximum(first, low_key - window + 1 - shift)
            all_first = tl.maximum(all_first, high_key - window + 1 - shift)
    first = first // BLOCK_M * BLOCK_M
    last = tl.maximum(last, first)
    if PARTLY:
        return first, last, last, last
    stop = tl.cdiv(last, BLOCK_M) * BLOCK_M
    all_first = tl.minimum(tl.cdiv(all_first, BLOCK_M) * BLOCK_M, stop)
    if WINDOW:
        all_last = tl.maximum(tl.maximum(all_last, 0) // BLOCK_M * BLOCK_M, all_first)
    else:
        all_last = tl.maximum(stop, all_first)
    return first, all_first, all_last, last
