"""A configuration that was changed after it was made."""

import copy

import pytest
import tiny
import torch
from transformers import AutoConfig

from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM, modeling_diff
from diffattn.nn import DiffAttention

GEOMETRY = ("num_attention_heads", "num_key_value_heads", "head_dim")


def geometry(config):
    return tuple(getattr(config, name) for name in GEOMETRY)


CHANGES = [
    {"attention": "v2"},
    {"attention": ["v2", "v1"]},
    {"match_heads": 4},
    {"num_hidden_layers": 3},
    {"match_key_value_heads": 4},
    {"match_head_dim": 12},
    {"attention": "grouped_latent", "noise_ratio": 4},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_model_is_built_saved_and_loaded_with_what_the_fields_say_now(change, tmp_path):
    config = tiny.config("v1")
    for name, value in change.items():
        setattr(config, name, value)
    model = DiffTransformerForCausalLM(copy.deepcopy(config)).eval()
    fresh = tiny.config("v1", **change)
    assert geometry(model.config) == geometry(fresh)
    assert model.config.layer_types == fresh.layer_types
    model.save_pretrained(tmp_path / "model")
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path / "model")
    ids = tiny.tokens(1, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    config.save_pretrained(tmp_path / "config")
    assert geometry(DiffTransformerConfig.from_pretrained(tmp_path / "config")) == geometry(fresh)


@torch.no_grad()
def test_fields_given_at_loading_decide(tmp_path):
    tiny.config("v1").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attention="v2")
    model = DiffTransformerForCausalLM(config)
    assert geometry(model.config) == geometry(tiny.config("v2"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": ["v1"]}, "attention: expected 2 kinds, one for each layer, got 1"),
        ({"attention": "v3"}, "attention: expected one of .* got 'v3'"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types: expected 2"),
        ({"sliding_window": 4}, "sliding_window: 4 does not fit layer_types"),
        ({"sliding_window": 0, "layer_types": None}, "sliding_window: expected a whole number"),
        ({"hidden_act": "gelu"}, "hidden_act: expected one of .* got 'gelu'"),
        ({"match_heads": 7}, "match_heads: 7 does not divide hidden_size = 64"),
    ],
    ids=str,
)
def test_a_change_of_no_meaning_is_refused_when_a_model_is_built(change, message):
    config = tiny.config("v1")
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        DiffTransformerForCausalLM(config)


def test_choices_override_the_preset_of_every_differential_layer():
    config = tiny.config("mixed", output_gate=True, head_norm=False, lam="sigmoid")
    model = DiffTransformerForCausalLM(config)
    for index, layer in enumerate(model.model.layers):
        if config.attention_kind(index) == "softmax":
            continue
        assert layer.self_attn.g_proj is not None
        assert layer.self_attn.subln is None
        heads = layer.self_attn.sizes.num_diff_heads
        assert layer.self_attn.lam.lambda_proj.out_features == heads


NARROW = {"wide_values": False, "head_norm": False}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_narrow_values_are_filled_up_for_the_kernel_and_cut_off_behind_it(attn):
    """Own noise keys with values of D: the kernel sees 2 D for both, the layer's own run D."""
    model = tiny.model("v1-gqa", attn, **NARROW)
    layer, seen = model.model.layers[0].self_attn, {}
    layer.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(x=args[0], out=out[0]), with_kwargs=True
    )
    cached = getattr(model(tiny.tokens(2, 7), use_cache=True), modeling_diff._CACHE_FIELD)
    assert cached.layers[0].values.shape[-1] == model.config.head_dim == 2 * layer.value_dim
    alone = DiffAttention(
        64,
        sizes=layer.sizes,
        lam="exponential",
        layer_idx=0,
        own_noise_key=True,
        head_norm=False,
        rope_theta=model.config.rope_theta,
    )
    alone.load_state_dict(layer.state_dict())
    torch.testing.assert_close(seen["out"], alone(seen["x"]), rtol=0, atol=1e-6)
