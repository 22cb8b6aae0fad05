"""Every example that a reader can copy runs."""

import ast
import doctest
import importlib.util
import inspect
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


def run_block(number):
    if "transformers" in BLOCKS[number]:
        pytest.importorskip("transformers", reason="the block needs the extra hf")
    names = {}
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    return names


@pytest.mark.parametrize("number", [n for n, block in enumerate(BLOCKS) if "print" in block])
def test_blocks_of_the_readme_that_print(number, capsys):
    run_block(number)
    assert "torch.Size" in capsys.readouterr().out


PAGES = {
    f"{page.name}-{number}": block
    for page in sorted(ROOT.glob("docs/*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}


@pytest.mark.parametrize("name", list(PAGES))
def test_blocks_of_the_pages(name):
    block = PAGES[name]
    if "transformers" in block or "diffattn.models" in block:
        newer = re.search(r"# transformers ([\d.]+) or newer", block)
        pytest.importorskip("transformers", minversion=newer and newer[1])
    exec(compile(block, name, "exec"), {})


def test_the_page_of_the_layers_has_every_option_with_its_default():
    text = (ROOT / "docs/layers.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    assert set(rows) == diffattn.nn.DiffOptions.__optional_keys__
    builders = (diffattn.nn.AttentionLayer, diffattn.DiffAttention)
    for parameters in (inspect.signature(builder).parameters for builder in builders):
        for name in set(rows) & set(parameters) - {"lam_per", "head_norm"}:
            default = parameters[name].default
            written = ast.literal_eval(rows[name].split(";")[0])
            assert written == default, name


def test_the_block_of_the_readme_that_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (number,) = (n for n, block in enumerate(BLOCKS) if "print" not in block)
    names = run_block(number)
    trainer, model = names["trainer"], names["model"]
    assert trainer.state.global_step == 2
    assert trainer.lr_scheduler.get_last_lr()[0] < 1e-3, "the Trainer's schedule is in force"
    decay = {
        id(parameter): group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    spared = {name for name, p in model.named_parameters() if decay[id(p)] == 0.0}
    stock = set(trainer.get_decay_parameter_names(model))
    needed = {name for name in spared & stock if name.startswith("model.layers.0.")}
    lam = {f"lam.lambda_{vector}" for vector in ("q1", "q2", "k1", "k2")}
    assert needed == {f"model.layers.0.self_attn.{name}" for name in {*lam, "subln.weight"}}
    assert {decay[id(p)] for name, p in model.named_parameters() if "_proj" in name} == {0.1}


def test_the_first_screen_explains_every_symbol_and_the_variants_name_their_papers():
    text = (ROOT / "README.md").read_text()
    first = text.split("Two commands")[0]
    for symbol in ("q, k ", "q', k' ", "s, M ", "lam, v "):
        assert f"    {symbol}" in first
    variants = text.split("## The variants")[1].split("\n## ")[0]
    for source in ("2410.05258", "V2, January 2026", "2510.06949", "2505.16333"):
        assert source in variants
    for command in ("make demo", "make test"):
        assert text.index(command) < text.index("## The variants")


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
