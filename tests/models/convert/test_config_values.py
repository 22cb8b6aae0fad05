"""Values of config.json that mean nothing are one line that names the file."""

import folders
import pytest
import test_softmax
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

VALUES = {
    "ours": [
        ("match_heads", "8", "match_heads: expected int, got '8'"),
        ("match_heads", None, "match_heads: expected int, got None"),
        ("match_heads", 3, "match_heads: 3 does not divide"),
        ("hidden_size", "64", "hidden_size: expected int"),
        ("vocab_size", -1, "vocab_size: expected a whole number from 1, got -1"),
        ("attention", "v9", "attention: expected one of"),
        ("attention", [1, 2], "attention: expected str"),
        ("head_dim", 99, "head_dim: follows from attention and match_heads"),
        ("layer_types", "full", "layer_types: expected list"),
        ("rms_norm_eps", "x", "rms_norm_eps: expected float, got 'x'"),
        ("rms_norm_eps", None, "rms_norm_eps: expected float, got None"),
        ("qk_norm", "x", "qk_norm: expected bool, got 'x'"),
        ("rope_parameters", "x", "rope_parameters: expected dict"),
        ("dtype", "zzz", "zzz"),
        ("layout", 5, "layout: expected one of"),
        ("layout", "zzz", "layout: expected one of"),
        ("rotary", "zzz", "rotary: expected one of"),
    ],
    "diffllama": [
        ("num_attention_heads", 7, "V1 pairs the heads"),
        ("num_key_value_heads", 3, "V1 pairs the key heads"),
        ("num_key_value_heads", 0, "key_value_heads: expected a whole number from 1"),
        ("hidden_size", "x", "hidden_size"),
        ("rms_norm_eps", "x", "rms_norm_eps"),
        ("rope_parameters", "x", "rope_parameters"),
        ("dtype", "zzz", "zzz"),
    ],
    "plain": [
        ("num_key_value_heads", 3, "match_key_value_heads: 3"),
        ("num_attention_heads", "8", "num_attention_heads"),
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("head_dim", 0, "head_dim: expected a whole number from 1, or None, got 0"),
        ("hidden_size", None, "hidden_size"),
        ("rms_norm_eps", "x", "rms_norm_eps"),
        ("dtype", "zzz", "zzz"),
    ],
}


def saved(kind, folder):
    if kind == "ours":
        return folders.ours(folder)
    if kind == "plain":
        model = test_softmax.plain()
    else:
        model = DiffLlamaForCausalLM(DiffLlamaConfig(**test_softmax.SIZES))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "name", "value", "reason"),
    [(kind, *values) for kind, each in VALUES.items() for values in each],
)
def test_a_value_without_a_meaning(kind, name, value, reason, tmp_path):
    folder = folders.changed(saved(kind, tmp_path / "in"), **{name: value})
    words = {"ours": ("--to", "diffllama"), "plain": ("--from-softmax", "v2")}.get(kind, ())
    code, said = folders.convert(folder, tmp_path / "out", *words)
    assert code == 2
    assert "convert: in: config.json: " in said
    assert reason in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["nope", None, 5])
def test_a_start_from_another_model(model, tmp_path):
    folder = folders.changed(saved("plain", tmp_path / "in"), model_type=model)
    code, said = folders.convert(folder, tmp_path / "out", "--from-softmax", "v2")
    assert (code, "model_type: expected one of" in said, f"got {model!r}" in said) == (
        2,
        True,
        True,
    )


def test_a_start_without_config(tmp_path):
    folder = saved("plain", tmp_path / "in")
    (folder / "config.json").unlink()
    code, said = folders.convert(folder, tmp_path / "out", "--from-softmax", "v2")
    assert (code, "model_type: expected one of" in said) == (2, True)


def test_a_layout_that_is_none_is_no_matter_of_the_option(tmp_path):
    folder = folders.changed(saved("ours", tmp_path / "in"), layout="zzz")
    for words in ((), ("--from", "diffattn")):
        said = folders.convert(folder, tmp_path / "out", "--to", "diffllama", *words)[1]
        assert "in: config.json: layout: expected one of" in said
