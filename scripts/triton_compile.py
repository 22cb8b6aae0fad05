"""Compiles every GPU kernel ahead of time, no GPU needed; prints what each block size takes.

    python scripts/triton_compile.py [--arch 80 90] [--dtype bf16 fp32] [--widths 64,128 ...]

A line for each kernel, architecture, dtype and (query, value) width: of every block size that the
autotuner tries, registers of a thread, KiB of shared memory, bytes of a thread's stack, and how
many instructions of an inner loop reach that stack, where any do. With --best only the block size
with the fewest of them. Exit code 1 where no block size of a line fits.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diffattn.ops.gpu import kernels

WIDTHS = ["32,64", "64,64", "64,128", "128,128", "128,256"]
POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
SHARED = {80: 163, 90: 227}  # KiB of one program
TILES = {"q", "k", "v", "q_noise", "k_noise", "out", "noise_out", "d_out", "d_q", "d_k", "d_v"}
TILES |= {"d_q_noise", "d_k_noise"}
SUMS = {"lam", "mask", "sink", "sink_noise", "gain", "lse", "lse_noise", "delta", "delta_noise"}
SUMS |= {"signal_out", "signal_parts", "noise_parts"}
REALS = {"scale", "eps", "factor"}
FIXED = {
    "CAUSAL": True,
    "SAVE": True,
    "OWN_KEY": True,
    "SPLITS": 16,
    **dict.fromkeys(("WINDOW", "PACKED", "MASK", "SINK", "NORM"), False),
}


def configurations(name):
    """The autotuner's choices of a kernel, or what the operators pass where nothing is chosen."""
    kernel = getattr(kernels, name)
    rows = {"split_forward": {"BLOCK_M": 16}, "sums": {"BLOCK_M": 32}}.get(name, {})
    if not hasattr(kernel, "configs"):
        return kernel, [(rows, 4, 3)]
    return kernel.fn, [(rows | c.kwargs, c.num_warps, c.num_stages) for c in kernel.configs]


def types_of(kernel, dtype, sizes):
    """Signature, constants and alignment as a call with ordinary tensors has them."""
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in sizes:
            signature[name] = "constexpr"
        elif name in TILES and not (name == "noise_out" and "signal_out" in kernel.arg_names):
            signature[name] = POINTERS[dtype]
        elif name in SUMS or name == "noise_out":
            signature[name] = "*fp32"
        elif name.startswith("doc_"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in REALS else "i32"
        stride = re.fullmatch("(q|k|v|q2|k2)_[btshgn]", name)
        if signature[name].startswith("*") or stride:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, aligned


def compiled(kernel, dtype, widths, config, arch):
    """Registers, KiB of shared memory, bytes of stack, instructions of a loop that reach it."""
    blocks, warps, stages = config
    query, value = widths
    sizes = {**FIXED, **blocks, "D": query, "E": value}
    sizes |= {"BLOCK_D": max(16, query), "BLOCK_E": max(16, value), "PRECISION": "ieee"}
    sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    signature, aligned = types_of(kernel, dtype, sizes)
    found = triton.compile(
        ASTSource(kernel, signature, sizes, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(found.asm["cubin"])
        binary.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", binary.name)
        code = tool("nvdisasm", "-c", binary.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    stack = int(re.search(r"STACK:(\d+)", usage)[1])
    return registers, found.metadata.shared / 1024, stack, spilling(code)


def tool(name, *arguments):
    """Output of one of NVIDIA's tools, which Triton's wheel brings."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def spilling(code):
    """Loads and stores of the stack in an inner loop, the most of any."""
    labels, lines = {}, []
    for line in code.splitlines():
        label = re.match(r"(\.L_x_\d+):", line.strip())
        if label:
            labels[label[1]] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            lines.append(line)
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"BRA.*?(\.L_x_\d+)", line)
        if jump and labels.get(jump[1], end + 1) <= end:
            loops.append((labels[jump[1]], end))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max(
        (sum("STL" in line or "LDL" in line for line in lines[a : b + 1]) for a, b in inner),
        default=0,
    )


def told(config, result, arch):
    """One block size in words."""
    blocks, warps, stages = config
    registers, shared, stack, spills = result
    size = "x".join(str(blocks[axis]) for axis in ("BLOCK_M", "BLOCK_N") if axis in blocks)
    text = (
        f"{size or '1'} ({warps} warps, {stages} stages): {registers} registers, {shared:.0f} KiB"
    )
    text += f", {stack} B stack" if stack else ""
    text += f", {spills} in a loop" if spills else ""
    return text + ("" if shared <= SHARED[arch] else ", too large")


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", type=int, default=[80, 90])
    parser.add_argument("--dtype", nargs="*", default=["bf16"], choices=list(POINTERS))
    parser.add_argument("--widths", nargs="*", default=WIDTHS, help="query,value")
    names = ["forward", "query_gradients", "key_gradients", "split_forward", "sums", "join"]
    parser.add_argument("--kernel", nargs="*", default=names, choices=names)
    parser.add_argument("--best", action="store_true")
    args = parser.parse_args()
    print(f"triton {triton.__version__}, causal\n")
    print("| kernel | sm | dtype | widths | block sizes |\n|---|---|---|---|---|")
    failed = False
    for name in args.kernel:
        kernel, choices = configurations(name)
        for arch in args.arch:
            for dtype in args.dtype:
                for widths in args.widths:
                    pair = tuple(map(int, widths.split(",")))
                    rows = [(c, compiled(kernel, dtype, pair, c, arch)) for c in choices]
                    fitting = [row for row in rows if row[1][1] <= SHARED[arch]]
                    failed = failed or not fitting
                    if args.best and fitting:
                        rows = [min(fitting, key=lambda row: row[1][3])]
                    texts = "; ".join(told(*row, arch) for row in rows)
                    print(f"| {name} | {arch} | {dtype} | {widths} | {texts} |", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
