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

import torch

from diffattn.bench.sides import DTYPES, PASSES, Shape, Side, one_pass, operands
from diffattn.memory import peak_of


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
    return peak_of(one_pass(side, operands(side, shape, DTYPES[dtype], device), PASSES[1]), device)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    print(_measured(Side(*asked["side"]), Shape(*asked["shape"]), asked["dtype"], asked["device"]))
