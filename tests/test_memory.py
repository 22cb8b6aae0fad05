"""Peaks and free memory, as the system tells them."""

import sys

import pytest
import torch

from diffattn import memory
from diffattn.memory import free_memory, peak_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")


def test_the_peak_of_a_computation_is_what_it_touches():
    size = 64 * 2**20

    def run():
        torch.ones(size // 4)  # given back at once
        torch.ones(size // 8)

    assert 0.9 * size < peak_of(run, "cpu") < 1.3 * size


def test_free_memory_is_what_the_system_could_give(monkeypatch, tmp_path):
    assert free_memory("cpu") > 2**20
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable: 300 kB\n")
    assert free_memory("cpu") == 300 * 1024
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\n")
    with pytest.raises(OSError, match="does not tell MemAvailable"):
        free_memory("cpu")


@pytest.mark.gpu
def test_the_peak_on_a_gpu():
    assert peak_of(lambda: torch.ones(2**20, device="cuda"), "cuda") == 2**22
    assert free_memory("cuda") > 2**30
