"""The route into vLLM: the entry point, and the same tokens where vLLM is installed."""

import ast
import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from diffattn.errors import MissingExtraError, UserError
from diffattn.models import vllm_plugin

ROOT = Path(__file__).parents[2]


class Registry:
    """The part of vLLM's registry that a plugin meets."""

    def __init__(self, backends):
        self.models = dict.fromkeys(backends)

    def get_supported_archs(self):
        return self.models.keys()

    def register_model(self, architecture, model):
        self.models[architecture] = model


@pytest.fixture
def install(monkeypatch):
    """Puts a vLLM with the given backends in the place of any other; returns its registry."""

    def put(*backends):
        vllm = ModuleType("vllm")
        vllm.__version__ = "0.0.1"
        vllm.ModelRegistry = Registry(backends)
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        return vllm.ModelRegistry

    return put


def test_the_entry_point_leads_to_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("diffattn", value, "vllm.general_plugins").load() is vllm_plugin.register


def test_our_architecture_maps_to_the_transformers_backend_however_often(install):
    registry = install("TransformersForCausalLM")
    for _ in range(2):
        vllm_plugin.register()
        assert registry.models == {
            "TransformersForCausalLM": None,
            "DiffTransformerForCausalLM": (
                "vllm.model_executor.models.transformers:TransformersForCausalLM"
            ),
        }


def test_a_vllm_without_the_backend_is_refused_with_its_version(install):
    registry = install("LlamaForCausalLM")
    with pytest.raises(UserError, match=r"vllm: .*TransformersForCausalLM.* got 0\.0\.1"):
        vllm_plugin.register()
    assert "DiffTransformerForCausalLM" not in registry.models


def test_without_vllm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"`vllm`: pip install 'diffattn\[vllm\]'"):
        vllm_plugin.register()


def test_no_file_imports_vllm_before_it_is_asked_to():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "vllm" for name in names), path


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["v1-gqa", "v2-gqa", "grouped"])
def test_vllm_gives_the_greedy_tokens_of_transformers(kind, tmp_path):
    """Through the entry point of the installed package, every process of vLLM its own."""
    script, out = ROOT / "scripts" / "vllm_greedy.py", tmp_path / "tokens.json"
    run = subprocess.run(
        [sys.executable, script, "--kinds", kind, "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (result,) = json.loads(out.read_text())["runs"]
    assert set(result["equal"]) == set(result["equal_second_pass"]) == {48}
    assert max(result["prompt_tokens_from_cache"]) > 0
    assert min(result["distinct"]) > 20  # no loop of few tokens
    assert max(result["equal_without_noise_map"]) < 24  # and the noise map decides them
