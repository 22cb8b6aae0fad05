"""Saving and loading: bitwise, in a new process, nothing missing, nothing pickled."""

import json
import subprocess
import sys

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from diffattn.models import DiffTransformerForCausalLM, DiffTransformerModel
from diffattn.ops import lambda_init

CHECKPOINTS = {
    "v1-tied": ("v1", {}),
    "v1-untied": ("v1-gqa", {"tie_word_embeddings": False}),
    "mixed-tied": ("mixed", {}),
    "grouped-start": ("grouped", {"lambda_start": 0.7}),
    "gate-norms-bias": ("gated qk-norm", {"attention_bias": True}),
    "latent": ("grouped_latent", {}),
    "sinks": ("sinks", {}),
    "lam-per-head": ("v1", {"lam_per": "head"}),
    "poly-norm": ("v2", {"hidden_act": "poly_norm"}),
}

LOADER = """
import json, sys
import torch
from diffattn.models import DiffTransformerForCausalLM

found = {}
for folder in sys.argv[1:]:
    model = DiffTransformerForCausalLM.from_pretrained(folder, attn_implementation="eager")
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found[folder] = {
        "range": {n: [t.min().item(), t.max().item(), str(t.dtype)] for n, t in state.items()},
        "tied": model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(),
    }
print(json.dumps(found))
"""


def with_distinct_constants(model):
    """Fill every parameter with a constant of its own; return the constants by name."""
    constants = {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.fill_(index + 1 / 3)
            constants[name] = parameter.flatten()[0].item()
    return constants


def test_distinct_constants_survive_a_new_process_bitwise(tmp_path):
    """Acceptance case 15, for every kind of model in one new process."""
    wanted = {}
    for name, (kind, options) in CHECKPOINTS.items():
        model = tiny.model(kind, "eager", **options)
        wanted[str(tmp_path / name)] = (with_distinct_constants(model), model)
        model.save_pretrained(tmp_path / name)
    run = subprocess.run(
        [sys.executable, "-c", LOADER, *wanted], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for folder, (constants, model) in wanted.items():
        loaded = found[folder]
        tied = model.config.tie_word_embeddings
        assert loaded["tied"] == tied
        names = set(loaded["range"])
        assert set(constants) <= names
        for name, constant in constants.items():
            assert loaded["range"][name] == [constant, constant, "torch.float32"], name
        if tied:
            embedding = constants["model.embed_tokens.weight"]
            assert loaded["range"]["lm_head.weight"][:2] == [embedding, embedding]
        for index in range(model.config.num_hidden_layers):
            start = f"model.layers.{index}.self_attn.lam.start"
            if start in names:
                given = model.config.lambda_start
                value = torch.tensor(lambda_init(index) if given is None else given).item()
                assert loaded["range"][start] == [value, value, "torch.float32"]


@pytest.mark.parametrize("kind", ["v1", "v2", "mixed"])
def test_no_pickle_is_written_and_the_start_value_is_not_stored(kind, tmp_path):
    model = tiny.model(kind)
    model.save_pretrained(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["config.json", "generation_config.json", "model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.lam.lambda_k2",
        "model.layers.0.self_attn.subln.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_a_missing_tensor_is_an_error_that_names_it(name, tmp_path):
    tiny.model("v1").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    del stored[name]
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks") as caught:
        DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert name in str(caught.value)


def test_an_untied_output_layer_may_not_be_missing(tmp_path):
    tiny.model("v1", tie_word_embeddings=False).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    del stored["lm_head.weight"]
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*lm_head\.weight"):
        DiffTransformerForCausalLM.from_pretrained(tmp_path)


def test_a_tensor_of_another_shape_is_an_error(tmp_path):
    tiny.model("v1").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.0.self_attn.subln.weight"] = torch.ones(5)
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"subln|mismatch"):
        DiffTransformerForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", list(tiny.KINDS))
@torch.no_grad()
def test_logits_survive_a_file_bitwise(kind, tmp_path):
    model, ids = tiny.model(kind), tiny.tokens()
    model.save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    first, second = (load_file(f / "model.safetensors") for f in (tmp_path, again))
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["v1", "v2", "grouped", "mixed"])
def test_loading_fills_every_tensor_of_a_model_built_without_memory(kind, tmp_path):
    """Weights and the lam start, which no file holds, on the way through the meta device."""
    model = tiny.model(kind)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = DiffTransformerForCausalLM(tiny.config(kind))
    assert all(t.is_meta for t in (*empty.parameters(), *empty.buffers()))
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # uninitialised memory now reads as NaN
    try:
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    got = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    assert set(got) == set(wanted)
    assert any("lam.start" in name for name in got) == (kind != "v2")
    for name, tensor in got.items():
        assert not tensor.is_meta
        assert torch.equal(tensor, wanted[name]), name


def test_the_decoder_loads_from_a_causal_model_and_back(tmp_path):
    model, ids = tiny.model("v1"), tiny.tokens()
    model.save_pretrained(tmp_path / "causal")
    decoder = DiffTransformerModel.from_pretrained(tmp_path / "causal")
    decoder.save_pretrained(tmp_path / "decoder")
    back = DiffTransformerForCausalLM.from_pretrained(tmp_path / "decoder")
    assert torch.equal(back(ids).logits, model(ids).logits)


def test_loading_info_is_returned_when_asked_for(tmp_path):
    tiny.model("v1").save_pretrained(tmp_path)
    model, info = DiffTransformerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, DiffTransformerForCausalLM)
    assert not info["missing_keys"]


@pytest.mark.parametrize("kind", ["v1", "v2", "grouped", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_lambda_and_gains_stay_fp32_in_a_model_loaded_in_low_precision(kind, dtype, tmp_path):
    model = tiny.model(kind)
    model.save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
        if ".lam." in name or "norm" in name or ".subln." in name:
            assert tensor.dtype == torch.float32, name
            assert torch.equal(tensor, wanted[name]), name
        else:
            assert tensor.dtype == dtype, name
    logits = loaded(tiny.tokens()).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("way", ["load", "cast"])
def test_lam_of_a_bf16_model_is_exact(way, tmp_path):
    """Acceptance case 4: dot products 0.003 and 0, start 0.2 give 0.203005, not 0.2002."""
    model = tiny.model("v1")
    lam = model.model.layers[0].self_attn.lam
    with torch.no_grad():
        for vector in lam.parameters():
            vector.zero_()
        lam.lambda_q1[0], lam.lambda_k1[0] = 1.0, 0.003
    if way == "load":
        model.save_pretrained(tmp_path)
        model = DiffTransformerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    else:
        model = model.to(torch.bfloat16)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    value = model.model.layers[0].self_attn.lam(torch.empty(0))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(0.203005, abs=1e-5)


def test_a_bf16_checkpoint_keeps_lambda_in_fp32(tmp_path):
    model = tiny.model("v1").bfloat16()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    vectors = {name for name in stored if ".lam." in name}
    assert len(vectors) == 8
    assert all(stored[name].dtype == torch.float32 for name in vectors)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    wanted = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, wanted[name].to(parameter.dtype)), name


def test_a_tensor_too_many_is_an_error_that_names_it(tmp_path):
    model = tiny.model("v1", "sdpa", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"has no place for \d+ tensor.*model\.layers\.1\."):
        type(model).from_pretrained(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    model = tiny.model("v1", "sdpa")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        type(model).from_pretrained(tmp_path)
