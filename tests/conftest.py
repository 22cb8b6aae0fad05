"""What every test shares: one thread, a fixed seed, the markers, the hypothesis profiles."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from diffattn.ops.fused.library import compiler

HERE = Path(__file__).parent
# make `import oracles` and `import tiny` work in every folder
sys.path += [str(HERE), str(HERE / "models")]

torch.set_num_threads(1)

# the autouse fixtures below set a seed, which needs no reset between examples
_SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile(
    "default", max_examples=100, deadline=None, suppress_health_check=_SUPPRESSED
)
settings.register_profile(
    "many", max_examples=2000, deadline=None, suppress_health_check=_SUPPRESSED
)
settings.load_profile("default")  # `--hypothesis-profile=many` chooses the other


# folders whose every test needs an optional package
NEEDS = {"transformers": ["bench", "models", "dex", "study", "suites"]}
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
collect_ignore = [folder for name in MISSING for folder in NEEDS[name]]


def pytest_report_header():
    return [
        f"not run: tests/{folder}, which need the extra hf ({name} is not installed)"
        for name in MISSING
        for folder in NEEDS[name]
    ]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption(
        "--write-support", action="store_true", help="write docs/support.md anew (with -n 0)"
    )


def pytest_collection_modifyitems(config, items):
    no_device = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    unasked = pytest.mark.skip(reason="takes minutes; run with -m slow")
    no_vllm = pytest.mark.skip(reason="needs vLLM: pip install 'diffattn[vllm]'")
    no_triton = pytest.mark.skip(reason="needs Triton, on a GPU or interpreted: make triton")
    has_triton = importlib.util.find_spec("triton") is not None and (
        torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    )
    no_compiler = pytest.mark.skip(reason="impl='fused' needs a C++ compiler: g++, or CXX")
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if compiler() is None and ("fused" in parameters or "fused_kernel" in item.name):
            item.add_marker(no_compiler)
        if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
            item.add_marker(no_vllm)
        if item.get_closest_marker("triton") and not has_triton:
            item.add_marker(no_triton)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_device)
        if "slow" in item.keywords and "slow" not in config.getoption("markexpr"):
            item.add_marker(unasked)
