"""The compiled kernel: built once by the machine's compiler, kept in the user's cache."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("kernel") / "attention.cpp"
_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared"),
)

_logger = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel, loaded; compiled first where the cache does not hold it (some seconds).

    Raises:
        NotImplementedError: there is no compiler, it fails, or what it made cannot be loaded.
    """
    path = _path()
    if not path.is_file():
        _logger.info("compiling %s, once on this machine", SOURCE.name)
        _build(path)
    # torch is loaded: the kernel finds its OpenMP, and both share their threads
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:  # damaged, or on a file system that runs nothing
        raise NotImplementedError(f"impl='fused': cannot load {path}: {error}") from error
    for name in ("diff_attention_forward", "diff_attention_backward"):
        function = getattr(loaded, name)
        function.restype = None
        function.argtypes = [
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
            ctypes.c_double,
        ]
    step = loaded.diff_attention_step
    step.restype = None
    step.argtypes = [ctypes.c_int, *([ctypes.c_void_p] * 4)]
    return loaded


@functools.cache
def is_available() -> bool:
    """Whether this machine has the kernel or can compile it now; if not, the log says why."""
    try:
        library()
    except NotImplementedError as error:
        _logger.info("%s", error)
        return False
    return True


def compiler() -> str | None:
    """The compiler that would be used, or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


@functools.cache
def _path() -> Path:
    program = compiler()
    if program is None:
        raise NotImplementedError(
            "impl='fused' is compiled on first use and found no compiler: install g++, or set CXX, "
            "or choose another implementation"
        )
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    texts = [path.read_text() for path in sorted(SOURCE.parent.iterdir())]
    key = "\n".join((*texts, *_FLAGS, version.stdout, _processor(), torch.__version__))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(cache) / "diffattn" / "kernels" / f"attention-{digest}.so"


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _build(path: Path) -> None:
    program = compiler()
    assert program is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            target = Path(scratch) / path.name
            run = subprocess.run(
                [program, *_FLAGS, str(SOURCE), "-o", str(target)],
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                reason = (run.stderr.strip().splitlines() or ["no message"])[0]
                raise NotImplementedError(f"impl='fused': {program} failed: {reason}")
            os.replace(target, path)
    except OSError as error:
        raise NotImplementedError(f"impl='fused': cannot write {path}: {error}") from error
