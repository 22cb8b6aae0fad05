"""`diffattn convert` on folders."""

import json

import published
import pytest
import test_layers
import test_motif
import test_softmax
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DiffLlamaForCausalLM

from diffattn.cli import main
from diffattn.models import DiffTransformerForCausalLM

IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def run(capsys, *words):
    code = main(["convert", *map(str, words)])
    return code, capsys.readouterr().err


@pytest.fixture
def diffllama(tmp_path):
    torch.manual_seed(0)
    config = DiffLlamaConfig(**{**test_softmax.SIZES, "initializer_range": 0.05}, head_dim=12)
    DiffLlamaForCausalLM(config).save_pretrained(tmp_path / "diffllama")
    (tmp_path / "diffllama" / "tokenizer.json").write_text("{}")
    return tmp_path / "diffllama"


def test_a_folder_there_and_back(diffllama, tmp_path, capsys):
    code, said = run(capsys, diffllama, tmp_path / "ours")
    assert code == 0
    assert "layout of" in said
    assert (tmp_path / "ours" / "tokenizer.json").exists()
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(p).eval() for p in (diffllama, tmp_path / "ours")
    )
    assert isinstance(ours, DiffTransformerForCausalLM)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-6)
    assert run(capsys, tmp_path / "ours", tmp_path / "back", "--to", "diffllama")[0] == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    want = load_file(diffllama / "model.safetensors")
    assert set(back) == set(want)
    assert all(torch.equal(back[name], tensor) for name, tensor in want.items())
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "back"), DiffLlamaForCausalLM)


def test_motif_to_diffllama_is_refused_for_its_schedule(tmp_path, capsys):
    folder = tmp_path / "motif"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(test_motif.V1))
    save_file(published.drawn(test_motif.shapes(test_motif.V1)), folder / "model.safetensors")
    code, said = run(capsys, folder, tmp_path / "out", "--to", "diffllama")
    assert code == 2
    assert "lambda_layer_offset: DiffLlama has 0, got -1" in said
    assert not (tmp_path / "out").exists()
    assert run(capsys, folder, tmp_path / "ours", "--from", "motif")[0] == 0


def test_layers_of_another_model_there_and_back(tmp_path, capsys):
    state = {f"net.0.{k}": t for k, t in published.drawn(test_layers.V1).items()}
    state["net.1.mlp.weight"] = torch.randn(3, 3)
    save_file(state, tmp_path / "in.safetensors")
    assert run(capsys, tmp_path / "in.safetensors", tmp_path / "ours")[0] == 0
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["layout"] == "diffattn"
    code, said = run(capsys, tmp_path / "ours", tmp_path / "timm", "--to", "timm")
    assert (code, "timm does not match" in said) == (2, True)
    assert run(capsys, tmp_path / "ours", tmp_path / "back", "--to", "unilm-v1")[0] == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("kind", ["v2", "v1"])
def test_a_start_from_a_plain_model_says_what_it_changes(kind, tmp_path, capsys):
    source = test_softmax.plain("qwen2")
    source.save_pretrained(tmp_path / "plain")
    code, said = run(capsys, tmp_path / "plain", tmp_path / kind, "--from-softmax", kind)
    assert code == 0
    assert "parameters:" in said
    assert "deviation of the logits on drawn tokens: largest" in said
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path / kind).eval()
    with torch.no_grad():
        gap = (model(IDS).logits - source(IDS).logits).abs().max()
    assert gap < 1e-5 if kind == "v2" else gap > 1e-3


def refusals(folder, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    bare = tmp_path / "bare"
    bare.mkdir()
    save_file(load_file(folder / "model.safetensors"), bare / "model.safetensors")
    out = tmp_path / "out"
    return {
        "not there": ((tmp_path / "nowhere", out), "in: expected a folder or a .safetensors file"),
        "target in use": ((folder, full), "out: expected a new or empty folder"),
        "pickled": ((pickled, out), r"got only pickled weights \(pytorch_model.bin\)"),
        "broken": ((broken, out), "in: model.safetensors is not a safetensors file"),
        "no config": ((bare, out), "have the same shapes; without config.json name --from"),
        "wrong label": (
            (folder, out, "--from", "motif"),
            "from: motif was named, but the checkpoint is diffllama",
        ),
        "unknown label": ((folder, out, "--from", "llama"), "from: expected 'auto' or one of"),
        "unknown target": ((folder, out, "--to", "llama"), "to: expected one of"),
        "same": ((folder, out, "--to", "diffllama"), "to: the checkpoint is diffllama already"),
        "not plain": ((folder, out, "--from-softmax", "v2"), "model_type: expected one of"),
        "no such layer": ((folder, out, "--to", "timm"), "timm does not match"),
    }


def test_bad_input_is_one_line_and_writes_nothing(diffllama, tmp_path, capsys):
    import re

    for name, (words, sentence) in refusals(diffllama, tmp_path).items():
        code, said = run(capsys, *words)
        assert code == 2, name
        last = said.strip().splitlines()[-1]
        assert re.search(sentence, last), (name, said)
        assert not (tmp_path / "out").exists(), name
        assert not list(tmp_path.glob(".out*")), name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--from-softmax v2 --to diffllama", "to: expected diffattn with --from-softmax"),
        ("--from-softmax v2 --from motif", "from: expected auto with --from-softmax"),
        ("--from-softmax v1 --fold-gain", "fold-gain: expected False with --from-softmax"),
        ("--from-softmax v2 --lambda-start 0.7", "lambda-start: expected with from-softmax v1"),
        ("--from-softmax v1 --lambda-start nan", "lambda-start: expected a finite number, got nan"),
        ("--from-softmax v1 --lambda-start inf", "lambda-start: expected a finite number, got inf"),
        ("--lambda-start 0.7", "lambda-start: expected with --from-softmax v1 alone, got 0.7"),
        ("--fold-gain", "fold-gain: expected a target of ('unilm-v1', 'diffllama'), got diffattn"),
    ],
)
def test_options_that_do_not_go_together(words, sentence, diffllama, tmp_path, capsys):
    source = diffllama
    if "softmax" in words:
        source = tmp_path / "plain"
        test_softmax.plain().save_pretrained(source)
    code, said = run(capsys, source, tmp_path / "out", *words.split())
    assert (code, sentence in said) == (2, True), said
    assert not (tmp_path / "out").exists()


def test_a_start_from_one_file(tmp_path, capsys):
    test_softmax.plain().save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    assert run(capsys, file, tmp_path / "out", "--from-softmax", "v2")[0] == 0
