"""Differential attention on a GPU: correct first, then its time and memory beside other forms.

    benchmarks/gpu.sh [--seconds 450]

For a Transformer of 2 PAIRS heads, V1 has PAIRS signal heads with values of twice the width. The
sides take turns; each row has the median of its times, their quartiles, the median ratio to
torch's softmax attention of equal width, and the memory that a pass takes beside its inputs.
Decoding is timed as a CUDA graph, so that no launch is counted. What the time does not suffice
for is named. Exit codes: 0, 1 (wrong results: nothing is timed), 2 (no GPU).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

# batch, pairs, tokens, head width, dtypes
TRAINED = [
    (2, 8, 2048, 64, ("bf16", "fp16")),
    (8, 4, 512, 32, ("bf16",)),
    (1, 8, 8192, 64, ("bf16",)),
    (1, 8, 4096, 64, ("bf16",)),
    (1, 1, 32768, 64, ("bf16",)),
]
# batch, pairs, keys, head width
DECODED = [(8, 8, 1024, 64), (8, 8, 8192, 64), (1, 8, 1024, 64), (1, 8, 8192, 64)]
CHECKED = [(2, 4, 300, 64), (2, 4, 300, 32)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TURNS = 25


def drawn(shape, dtype, device, gradients=False):
    """Unit-normal numbers from the global seed, the same for every dtype."""
    values = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    return values.requires_grad_(gradients)


def v1(batch, pairs, queries, keys, width, dtype, device, gradients=False):
    """q, k, v, q_noise, k_noise and lam of a V1 layer."""
    q, q_noise = (drawn((batch, queries, pairs, width), dtype, device, gradients) for _ in range(2))
    k, k_noise = (drawn((batch, keys, pairs, width), dtype, device, gradients) for _ in range(2))
    v = drawn((batch, keys, pairs, 2 * width), dtype, device, gradients)
    lam = drawn((pairs,), torch.float32, device, gradients)
    return [q, k, v, q_noise, k_noise, lam]


def differential(impl):
    """The operator by this implementation."""
    from diffattn.ops import diff_attention

    return lambda *tensors: diff_attention(*tensors[:5], lam=tensors[5], causal=True, impl=impl)


def four_calls(q, k, v, q_noise, k_noise, lam):
    """Two calls of equal width for each map, as published code has it."""
    halves = [half.transpose(1, 2) for half in v.chunk(2, dim=-1)]
    causal = q.shape[1] > 1
    maps = []
    for query, key in ((q, k), (q_noise, k_noise)):
        rows = query.transpose(1, 2), key.transpose(1, 2)
        parts = [F.scaled_dot_product_attention(*rows, half, is_causal=causal) for half in halves]
        maps.append(torch.cat(parts, dim=-1).transpose(1, 2))
    return (maps[0] - lam[:, None] * maps[1]).to(q.dtype)


def flex(length, device):
    """Two calls of FlexAttention, compiled, values of twice the width."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return query >= key

    blocks = create_block_mask(causal, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q, k, v, q_noise, k_noise, lam):
        values = v.transpose(1, 2)
        signal, noise = (
            compiled(a.transpose(1, 2), b.transpose(1, 2), values, block_mask=blocks)
            for a, b in ((q, k), (q_noise, k_noise))
        )
        return (signal - lam[:, None, None] * noise).transpose(1, 2).to(q.dtype)

    return run


def softmax(q, k, v):
    """Torch's softmax attention, (batch, heads, time, width)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def with_gradients(run, tensors):
    """Output and gradients under a fixed weighting, the same numbers in every dtype."""
    out = run(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    weight = weight.to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


def wrong(shapes, dtypes, device):
    """Lines about results whose error passes twice that of torch's kernel plus a rounding."""
    found, checked = [], []
    for batch, pairs, tokens, width in shapes:
        for name in dtypes:
            dtype = DTYPES[name]
            for queries in (tokens, 1):
                torch.manual_seed(0)
                tensors = v1(batch, pairs, queries, tokens, width, dtype, device)
                results = {}
                for side, impl in (("exact", "reference"), ("torch", "sdpa"), ("ours", "triton")):
                    work = torch.float64 if side == "exact" else None
                    leaves = [t.detach().to(work or t.dtype) for t in tensors]
                    if queries == 1:
                        results[side] = [differential(impl)(*leaves)]
                    else:
                        leaves = [leaf.requires_grad_() for leaf in leaves]
                        results[side] = with_gradients(differential(impl), leaves)
                names = ("out", "d_q", "d_k", "d_v", "d_q_noise", "d_k_noise", "d_lam")
                for part, exact, theirs, ours in zip(names, *results.values(), strict=False):
                    floor = torch.finfo(dtype).eps * exact.abs().max().item()
                    budget = 2 * (theirs.double() - exact).abs().max().item() + 4 * floor
                    error = (ours.double() - exact).abs().max().item()
                    where = f"{name} ({batch}, {pairs}, {queries} on {tokens}, {width}) {part}"
                    checked.append({"case": where, "error": error, "budget": budget})
                    if not error <= budget:
                        found.append(f"{where}: error {error:.2e}, budget {budget:.2e}")
    return found, checked


def clock(device):
    """A function that runs a pass and returns its milliseconds."""
    if device == "cpu":

        def on_cpu(run):
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)

        return on_cpu

    def on_gpu(run):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return on_gpu


def memory(run, device):
    """MiB that a pass takes at its peak beside what stands before it."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def graph(run):
    """A pass as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay


def turns(sides, device, deadline, most, with_memory):
    """Rows of one line: sides that run, in turns; a side that fails is named with its reason."""
    ready, rows, peaks = {}, [], {}
    for name, make in sides.items():
        if time.monotonic() > deadline:
            rows.append({"side": name, "left_out": "the time is over"})
            continue
        try:
            run = make()
            run()
            peaks[name] = memory(run, device) if with_memory else None
            ready[name] = run
        except Exception as error:  # a side of others may lack a kernel for this shape
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            rows.append({"side": name, "left_out": f"{type(error).__name__}: {reason}"})
    times = {name: [] for name in ready}
    measure = clock(device)
    for _ in range(most):
        for name, run in ready.items():
            times[name].append(measure(run))
        if time.monotonic() > deadline:
            break
    base = next(iter(times.values()), [])
    for name, own in times.items():
        low, middle, high = statistics.quantiles(own, n=4) if len(own) > 1 else own * 3
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        row = {"side": name, "ms": middle, "quartiles": [low, high], "turns": len(own)}
        rows.append({**row, "ratio_to_softmax": ratio, "peak_mib": peaks[name]})
    return rows


def trained_sides(shape, dtype, device, backward, with_flex):
    """Name -> function that makes a pass."""
    batch, pairs, tokens, width = shape
    torch.manual_seed(0)
    plain = [drawn((batch, 2 * pairs, tokens, width), dtype, device, backward) for _ in range(3)]
    tensors = v1(batch, pairs, tokens, tokens, width, dtype, device, backward)

    def one_pass(make, leaves):
        def made():
            run = make()
            if not backward:
                return lambda: run(*leaves)
            weight = torch.randn_like(run(*leaves))
            return lambda: torch.autograd.grad(run(*leaves), leaves, weight)

        return made

    return {
        "softmax, torch": one_pass(lambda: softmax, plain),
        "V1, ours": one_pass(lambda: differential("triton"), tensors),
        "V1, two calls": one_pass(lambda: differential("sdpa"), tensors),
        "V1, four calls": one_pass(lambda: four_calls, tensors),
        **({"V1, flex": one_pass(lambda: flex(tokens, device), tensors)} if with_flex else {}),
    }


def decoded_sides(shape, dtype, device):
    """The same for one query behind keys of a cache."""
    batch, pairs, keys, width = shape
    torch.manual_seed(0)
    q = drawn((batch, 2 * pairs, 1, width), dtype, device)
    k, v = (drawn((batch, 2 * pairs, keys, width), dtype, device) for _ in range(2))
    tensors = v1(batch, pairs, 1, keys, width, dtype, device)
    runs = {
        "softmax, torch": lambda: softmax(q, k, v),
        "V1, ours": lambda: differential("triton")(*tensors),
        "V1, two calls": lambda: differential("sdpa")(*tensors),
        "V1, four calls": lambda: four_calls(*tensors),
    }

    def made(run):
        if device == "cpu":
            return lambda: run
        run()  # what is chosen and compiled on first use is no part of the graph
        return lambda: graph(run)

    return {name: (lambda run=run: made(run)()) for name, run in runs.items()}


def measured(args, device):
    """Lines of the table, each with its rows."""
    end = args.started + args.seconds
    lines = []
    trained = [(1, 1, 64, 16, ("fp32",))] if args.smoke else TRAINED
    decoded = [(1, 1, 130, 16)] if args.smoke else DECODED
    work = [("decode", shape, "fp32" if args.smoke else "bf16") for shape in decoded]
    for *shape, dtypes in trained:
        for dtype in dtypes:
            work += [(kind, tuple(shape), dtype) for kind in ("forward", "forward + backward")]
    flexed = set() if args.smoke else {TRAINED[0][:4], TRAINED[2][:4]}
    for number, (kind, shape, dtype) in enumerate(work):
        deadline = min(end, time.monotonic() + 2 * (end - time.monotonic()) / (len(work) - number))
        if time.monotonic() > end:
            lines.append({"pass": kind, "shape": shape, "dtype": dtype, "left_out": "no time"})
            continue
        with torch.set_grad_enabled(kind == "forward + backward"):
            if kind == "decode":
                sides = decoded_sides(shape, DTYPES[dtype], device)
            else:
                with_flex = shape in flexed and dtype == "bf16"
                backward = kind != "forward"
                sides = trained_sides(shape, DTYPES[dtype], device, backward, with_flex)
            most = 2 if args.smoke else TURNS
            rows = turns(sides, device, deadline, most, kind != "decode")
        lines.append({"pass": kind, "shape": shape, "dtype": dtype, "rows": rows})
        print(told(lines[-1]), flush=True)
    return lines


def told(line):
    """One line of the table as text."""
    texts = []
    for row in line["rows"]:
        if "left_out" in row:
            texts.append(f"{row['side']}: left out, {row['left_out']}")
            continue
        low, high = row["quartiles"]
        text = f"{row['side']} {row['ms']:.3f} ms [{low:.3f}, {high:.3f}]"
        peak = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
        texts.append(f"{text}, ratio {row['ratio_to_softmax']:.2f}{peak}")
    return f"{line['shape']} {line['dtype']} {line['pass']}:\n  " + "\n  ".join(texts)


def about(device):
    """What ran where."""
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted: no timings"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"device": name, **versions, "commit": commit or "unknown"}


def main():
    """Check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--seconds", type=float, default=450.0, help="for everything")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny shapes in Triton's interpreter, to test this file",
    )
    args = parser.parse_args()
    args.started = time.monotonic()
    device = "cuda"
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
    elif not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU: torch.cuda.is_available() is False", file=sys.stderr)
        sys.exit(2)
    facts = about(device)
    print(facts, flush=True)
    shapes = [(1, 2, 40, 16)] if args.smoke else CHECKED
    errors, checked = wrong(shapes, ("bf16",) if args.smoke else ("bf16", "fp16"), device)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {**facts, "checked": checked, "wrong": errors}
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1))
    if errors:
        print("wrong results, nothing is timed:", *errors, sep="\n  ")
        sys.exit(1)
    print(f"correct in {len(checked)} comparisons, {time.monotonic() - args.started:.0f} s")
    report["lines"] = measured(args, device)
    report["seconds"] = time.monotonic() - args.started
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1))
    print(f"{args.out / 'gpu.json'} after {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
