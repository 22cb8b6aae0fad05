"""Peak memory of one forward and backward pass, each measured in a fresh process.

    python -m diffattn.bench.memory '{"side": ["v1", "sdpa"], "shape": [1, 1, 1, 512, 512, 64],
        "dtype": "fp32", "device": "cpu", "threads": 1}'

On a CPU it is the highest resident size during the pass less the resident size before it, inputs
drawn and a short pass done (VmHWM and VmRSS of Linux); on a GPU the same of torch's allocator. So
it counts outputs, gradients and all that lies between, not the inputs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from diffattn.bench.sides import DTYPES, PASSES, Shape, Side, one_pass, operands

_SELF = Path("/proc/self")


def peak_memory(side: Side, shape: Shape, dtype: str, device: str) -> int:
    """Bytes of one forward and backward pass.

    Args:
        side: of which.
        shape: its sizes.
        dtype: one of `diffattn.bench.sides.DTYPES`.
        device: "cpu" or "cuda".

    Raises:
        NotImplementedError: the process could not measure it; says why.
    """
    threads = torch.get_num_threads()
    asked = {"side": side, "shape": shape, "dtype": dtype, "device": device, "threads": threads}
    run = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(asked)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or [f"ended with code {run.returncode}"])[-1]
        raise NotImplementedError(f"its memory was not measured: {reason}")
    return int(run.stdout)


def _measured(side: Side, shape: Shape, dtype: str, device: str) -> int:
    short = shape._replace(queries=16, keys=16)
    one_pass(side, operands(side, short, DTYPES[dtype], device), PASSES[1])()
    run = one_pass(side, operands(side, shape, DTYPES[dtype], device), PASSES[1])
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    (_SELF / "clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
    before = _resident("VmRSS")
    run()
    return max(_resident("VmHWM") - before, 0)


def _resident(name: str) -> int:
    for line in (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this system does not tell {name}")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    print(_measured(Side(*asked["side"]), Shape(*asked["shape"]), asked["dtype"], asked["device"]))
