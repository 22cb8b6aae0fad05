"""Time of attention operators on this CPU: differential and softmax, forward and backward.

    python scripts/attention_speed.py [--seconds 8] [B,PAIRS,TOKENS,HEAD_DIM ...]

For a Transformer of 2 PAIRS heads, V1 has PAIRS signal heads with values of twice the width. The
sides take turns; printed are medians of the ratios to torch's softmax attention of equal width.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from diffattn.ops import diff_attention, softmax_attention

SHAPES = ["2,8,2048,64", "8,4,512,32", "1,8,8192,64"]


def drawn(*shape):
    """Random leaves."""
    return torch.randn(*shape, requires_grad=True)


def sides(batch, pairs, tokens, width):
    """Name -> (function of no arguments that runs forward, what it is differentiated by)."""
    heads = 2 * pairs
    q, k, v = (drawn(batch, heads, tokens, width) for _ in range(3))
    plain = [drawn(batch, tokens, heads, width) for _ in range(3)]
    four = [drawn(batch, tokens, pairs, width) for _ in range(4)]
    value, lam = drawn(batch, tokens, pairs, 2 * width), drawn(pairs)
    signal, key, noise, noise_key = four

    def differential(impl):
        return lambda: diff_attention(
            signal, key, value, noise, noise_key, lam=lam, causal=True, impl=impl
        )

    def softmax(impl):
        return lambda: softmax_attention(*plain, causal=True, impl=impl)

    return {
        "softmax, torch": (
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            [q, k, v],
        ),
        "softmax, fused": (softmax("fused"), plain),
        "softmax, blocked": (softmax("blocked"), plain),
        "V1, fused": (differential("fused"), [*four, value, lam]),
        "V1, blocked": (differential("blocked"), [*four, value, lam]),
        "V1, sdpa": (differential("sdpa"), [*four, value, lam]),
    }


def timed(run, leaves, backward):
    """Seconds of one pass."""
    start = time.perf_counter()
    out = run()
    if backward:
        torch.autograd.grad(out.sum(), leaves)
    return time.perf_counter() - start


def main():
    """Print a line for each shape and pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="B,PAIRS,TOKENS,HEAD_DIM")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each line")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, fp32")
    for shape in args.shapes:
        found = sides(*map(int, shape.split(",")))
        for backward in (False, True):
            times = {name: [] for name in found}
            for run, leaves in found.values():
                timed(run, leaves, backward)
            end = time.monotonic() + args.seconds
            while time.monotonic() < end or len(times["V1, sdpa"]) < 5:
                for name, (run, leaves) in found.items():
                    times[name].append(timed(run, leaves, backward))
            base, *others = times
            texts = []
            for name in others:
                pairs = zip(times[name], times[base], strict=True)
                texts.append(f"{name} {statistics.median(a / b for a, b in pairs):.2f}")
            kind = "forward + backward" if backward else "forward"
            print(
                f"({shape}) {kind}: {base} {1e3 * statistics.median(times[base]):.0f} ms; "
                f"ratios: {', '.join(texts)}; {len(times[base])} turns",
                flush=True,
            )


if __name__ == "__main__":
    main()
