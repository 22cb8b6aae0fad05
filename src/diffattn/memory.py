"""Memory: what a computation takes at its peak, and what there is."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc")


def peak_of(run: Callable[[], Any], device: str | torch.device) -> int:
    """Bytes that a computation takes at its peak beyond what was taken before it.

    On a CPU the highest resident size less the one before (VmHWM and VmRSS of Linux), after what
    the process holds and does not use was given back. On a GPU the same of torch's allocator.

    Args:
        run: the computation.
        device: where it runs.

    Raises:
        OSError: this system does not tell.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    _give_back()
    (_PROC / "self" / "clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
    before = _line(_PROC / "self" / "status", "VmRSS")
    run()
    return max(_line(_PROC / "self" / "status", "VmHWM") - before, 0)


def _give_back() -> None:
    """Give free pages of this process back, where its C library can: reused, they do not count."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def free_memory(device: str | torch.device) -> int:
    """Bytes that are free on a device, with what torch holds there and does not use.

    Raises:
        OSError: this system does not tell.
    """
    if torch.device(device).type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return _line(_PROC / "meminfo", "MemAvailable")


def _line(path: Path, name: str) -> int:
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this system does not tell {name}")
