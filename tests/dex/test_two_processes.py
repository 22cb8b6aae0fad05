"""Training with DEX on two processes is training on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trained
from safetensors.torch import load_file

from diffattn.training import read_metrics


def test_two_processes_train_as_one(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("trained.py")), str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    alone = trained.run(tmp_path / "one")
    together, single = (
        read_metrics(folder / "metrics.jsonl")
        for folder in (tmp_path / "two/run", tmp_path / "one")
    )
    assert len(together) == len(single) == 6
    for one, two in zip(single, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=5e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], abs=2e-5)
    tensors = load_file(tmp_path / "two" / "adapter" / "dex_model.safetensors")
    described = json.loads((tmp_path / "two" / "adapter" / "dex_config.json").read_text())
    assert described["step"] == 6
    for name, tensor in tensors.items():
        # Adam turns the rounding of a gradient near 0, as a key's bias has, into a step of any size
        if not name.endswith("bias"):
            here = alone.get_parameter(name).detach()
            torch.testing.assert_close(tensor, here, rtol=0, atol=1e-4, msg=name)
