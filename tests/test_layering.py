"""Imports run downwards only, and the base installation needs torch alone."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "diffattn"

# from the bottom up; siblings in one tuple do not import one another
LAYERS = (
    ("errors", "locks", "machine", "memory", "signals", "whole_file"),
    ("data", "folder", "report"),
    ("ops",),
    ("nn",),
    ("models",),
    ("dex",),
    ("training", "evaluation", "analysis"),
    ("bench", "compare", "study", "suites"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# what a layer may import of the package besides itself, where that is less than "all below"
ONLY = {
    "errors": set(),
    "data": {"errors"},
    "report": {"errors", "whole_file"},
    "ops": {"errors"},
    "nn": {"ops", "errors"},
}
# third-party packages of the layers that must work with torch alone
FOREIGN = {"ops": {"torch"}, "nn": {"torch"}, "errors": set(), "": {"torch"}}
# imported by none of them before it is used
FOREIGN_IN_FOLDERS = {"ops/gpu/kernels": {"triton"}}


def layer_of(module):
    """Top name below the package, "" for the package itself: diffattn.ops.masks -> ops."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path, root):
    """Modules that a file imports anywhere, absolute, with their lines."""
    inside = path.relative_to(root.parent).with_suffix("").parts
    package = inside[:-1]  # of __init__.py too: its parts end in "__init__"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            module = ".".join(base)
            if module == root.name:  # `from diffattn import ops` reaches a layer by name
                for alias in node.names:
                    whole = f"{module}.{alias.name}"
                    yield (whole if alias.name in LEVEL else module), node.lineno
            else:
                yield module, node.lineno


def violations(root):
    """Every import against the order of the layers, as readable lines."""
    found = []
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root).with_suffix("").parts
        layer = here[0] if here[0] != "__init__" else ""
        where = path.relative_to(root.parent).as_posix()
        for module, line in imports_of(path, root):
            top = module.split(".")[0]
            if top == root.name:
                reason = _inside(layer, layer_of(module))
            elif top in sys.stdlib_module_names:
                continue
            else:
                allowed = FOREIGN_IN_FOLDERS.get("/".join(here[:-1]), FOREIGN.get(layer))
                reason = None
                if allowed is not None and top not in allowed:
                    reason = f"{layer or 'the package'} may import {sorted(allowed)} alone"
            if reason:
                found.append(f"{where}:{line}: imports {module}: {reason}")
    return found


def _inside(layer, target):
    if layer == target:
        return None
    if layer == "":  # the package's own file re-exports the layers that need torch alone
        return None if target in ("nn", "ops", "errors") else f"{target} is optional"
    if layer not in LEVEL:
        return f"{layer} has no place in the order of layers"
    if target == "":
        return None if LEVEL[layer] > LEVEL["nn"] else "the package imports this layer"
    if target not in LEVEL:
        return f"{target} has no place in the order of layers"
    if layer in ONLY:
        return None if target in ONLY[layer] else f"{layer} may import {sorted(ONLY[layer])} alone"
    if LEVEL[target] > LEVEL[layer]:
        return f"{target} lies above {layer}"
    if LEVEL[target] == LEVEL[layer]:
        return f"{target} and {layer} are siblings"
    return None


def test_imports_run_downwards():
    assert violations(SOURCE) == []


def test_every_part_of_the_package_has_a_place():
    parts = {
        path.name.removesuffix(".py")
        for path in SOURCE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.name != "__init__.py"
    }
    assert parts <= set(LEVEL)


PLANTED = {
    "upward": ("ops/masks.py", "from diffattn.nn import RMSNorm\n", "ops may import"),
    "upward-lazy": (
        "nn/cache.py",
        "def f():\n    import diffattn.models.modeling_diff\n",
        "nn may import",
    ),
    "upward-relative": ("nn/cache.py", "from ..models import thing\n", "nn may import"),
    "upward-by-name": ("models/x.py", "from diffattn import dex\n", "dex lies above models"),
    "upward-from-dex": (
        "dex/x.py",
        "from diffattn.training import loop\n",
        "training lies above dex",
    ),
    "siblings": (
        "training/loop.py",
        "from diffattn.evaluation import perplexity\n",
        "evaluation and training are siblings",
    ),
    "siblings-back": (
        "analysis/x.py",
        "import diffattn.training\n",
        "training and analysis are siblings",
    ),
    "command-line": ("compare/x.py", "from diffattn import cli\n", "cli lies above compare"),
    "data": ("data/x.py", "from diffattn.ops import diff_attention\n", "data may import"),
    "errors": ("errors.py", "from diffattn.data import Corpus\n", "errors may import"),
    "foreign-in-ops": ("ops/x.py", "import numpy\n", "ops may import ['torch'] alone"),
    "foreign-in-nn": ("nn/x.py", "import transformers.masking_utils\n", "['torch'] alone"),
    "optional-in-package": ("__init__.py", "from diffattn.models import x\n", "optional"),
    "unknown": ("helpers.py", "from diffattn.ops import lambda_init\n", "no place"),
}


@pytest.mark.parametrize("case", list(PLANTED))
def test_a_planted_edge_is_found(case, tmp_path):
    file, text, reason = PLANTED[case]
    path = tmp_path / "diffattn" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (found,) = violations(tmp_path / "diffattn")
    assert file in found
    assert reason in found


def test_downward_edges_pass(tmp_path):
    for file, text in {
        "ops/x.py": "import math\nimport torch\nfrom diffattn.ops.masks import band\n",
        "nn/x.py": "import torch.nn.functional as F\nfrom ..ops import lambda_init\n",
        "models/x.py": "import transformers\nfrom diffattn.nn import RMSNorm\n",
        "dex/x.py": "from diffattn import ops\nfrom diffattn.data import Corpus\n",
        "training/x.py": "from diffattn.models import y\nfrom diffattn.errors import UserError\n",
        "cli/x.py": "from diffattn.compare import table\nimport diffattn\n",
    }.items():
        path = tmp_path / "diffattn" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert violations(tmp_path / "diffattn") == []


BARE = """
import sys, time

BLOCKED = {
    "transformers", "numpy", "matplotlib", "datasets", "tokenizers", "accelerate", "safetensors",
    "scipy", "jinja2", "triton", "flash_attn",
}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
import warnings
warnings.simplefilter("ignore")
import torch
started = time.perf_counter()
import diffattn
seconds = time.perf_counter() - started
layers = [
    diffattn.DiffAttention.v1(32, match_heads=4, layer_idx=0),
    diffattn.DiffAttention.v2(32, match_heads=4),
    diffattn.DiffAttention.grouped(32, match_heads=8, ratio=2, layer_idx=0),
]
x = torch.randn(2, 5, 32, requires_grad=True)
for layer in layers:
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape and x.grad.isfinite().all()
    assert all(p.grad is not None for p in layer.parameters())
try:
    import diffattn.models
except ImportError as error:
    sentence = str(error)
loaded = sorted(BLOCKED & set(sys.modules))
print(repr((seconds, sentence, loaded)), file=sys.stderr)
"""


def test_a_bare_installation_imports_and_trains_the_layers():
    """With every optional package blocked: silent, in under 2 s beyond torch."""
    run = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    seconds, sentence, loaded = ast.literal_eval(run.stderr.splitlines()[-1])
    assert seconds < 2.0
    assert loaded == []
    assert "pip install 'diffattn[hf]'" in sentence


def test_importing_the_package_prints_nothing():
    run = subprocess.run(
        [sys.executable, "-c", "import diffattn"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")
    assert "diffattn" not in run.stderr


def test_the_package_under_test_is_the_source_beside_the_tests():
    found = importlib.util.find_spec("diffattn")
    assert Path(found.origin).parent == SOURCE
