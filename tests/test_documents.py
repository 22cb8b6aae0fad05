"""Every example that a reader can copy runs."""

import doctest
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import diffattn

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def modules():
    with_hf = importlib.util.find_spec("transformers") is not None
    for package in ("ops", "nn", "models") if with_hf else ("ops", "nn"):
        parent = importlib.import_module(f"diffattn.{package}")
        for found in pkgutil.iter_modules(parent.__path__):
            yield f"diffattn.{package}.{found.name}"


@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_of_the_readme(number, capsys):
    if "transformers" in BLOCKS[number]:
        pytest.importorskip("transformers", reason="the block needs the extra hf")
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})
    assert "torch.Size" in capsys.readouterr().out


def test_the_first_block_fits_the_first_screen():
    assert len(BLOCKS[0].splitlines()) <= 12


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
        for named in re.findall(r"`((?:src|docs|tests)/[\w/.-]+)`", page.read_text()):
            assert (ROOT / named).exists(), f"{page.name} names {named}"


def test_the_version_is_in_the_changelog():
    assert f"## {diffattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()
