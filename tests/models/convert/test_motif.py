"""Motif's whole models: names, offsets and attention as published."""

import published
import pytest
import torch

from diffattn.errors import UserError
from diffattn.models import DiffTransformerForCausalLM
from diffattn.models.convert import from_motif, to_motif

SMALL = {
    "model_type": "Motif",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "attn_rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "poly_norm",
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
V1 = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
GROUPED = {
    **SMALL,
    "num_attention_heads": 10,
    "num_noise_heads": 2,
    "num_key_value_heads": 4,
    "head_dim": 6,
}


def shapes(config):
    heads, noise = config["num_attention_heads"], config.get("num_noise_heads", 0)
    D = config.get("head_dim", 16 // heads)
    signal = heads - noise if noise else heads // 2
    keys = config["num_key_value_heads"] * D
    found = {"model.embed_tokens.weight": (31, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        found |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj.weight": (heads * D, 16),
                "self_attn.k_proj.weight": (keys, 16),
                "self_attn.v_proj.weight": (keys, 16),
                "self_attn.o_proj.weight": (16, signal * 2 * D),
                "self_attn.subln.weight": (2 * D,),
                **{f"self_attn.lambda_{n}": (D,) for n in ("q1", "k1", "q2", "k2")},
                "mlp.gate_proj.weight": (24, 16),
                "mlp.up_proj.weight": (24, 16),
                "mlp.down_proj.weight": (16, 24),
                "mlp.act_fn.weight": (3,),
                "mlp.act_fn.bias": (1,),
                "input_layernorm.weight": (16,),
                "post_attention_layernorm.weight": (16,),
            }.items()
        }
    return found


def written_out(config, w, ids):
    """The whole model from its published description."""

    def norm(x, gain, eps):
        return published.normed(x, gain, eps)

    noise = config.get("num_noise_heads")
    ratio = (config["num_attention_heads"] - noise) // noise if noise else 1
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        own = {k.removeprefix(prefix): t for k, t in w.items() if k.startswith(prefix)}
        attention = {k.removeprefix("self_attn."): t for k, t in own.items() if "self_attn" in k}
        x = x + published.motif(
            attention, norm(x, own["input_layernorm.weight"], 1e-6), layer, ratio=ratio, eps=1e-5
        )
        y = norm(x, own["post_attention_layernorm.weight"], 1e-6)
        gate = y @ own["mlp.gate_proj.weight"].T
        poly = sum(
            own["mlp.act_fn.weight"][i] * norm(gate**power, 1.0, 1e-6)
            for i, power in enumerate((3, 2, 1))
        )
        up = (poly + own["mlp.act_fn.bias"]) * (y @ own["mlp.up_proj.weight"].T)
        x = x + up @ own["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"], 1e-6) @ w["model.embed_tokens.weight"].T


@pytest.mark.parametrize("config", [V1, GROUPED], ids=["motif", "motif2"])
def test_a_whole_model_is_the_same_function_and_comes_back_bitwise(config):
    state = published.drawn(shapes(config))
    ours, converted = from_motif(config, state)
    assert ours.attention == ("grouped" if "num_noise_heads" in config else "v1")
    model = DiffTransformerForCausalLM(ours).eval().double()
    model.load_state_dict(converted, strict=False)
    ids = torch.randint(1, 31, (2, 7))
    want = written_out(config, state, ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-10)
    theirs, back = to_motif(ours, converted)
    for name in config:
        assert theirs[name] == config[name], name
    assert set(back) == set(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bias": True}, "use_bias: our model has False, got True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"k_ratio": 2}, "k_ratio: our model has 1, got 2"),
        ({"num_attention_heads": 8}, "checkpoint: expected .*k_proj.weight of shape"),
        ({"num_noise_heads": 3, "num_attention_heads": 10}, "num_noise_heads: 3 do not divide 7"),
        ({"num_attention_heads": None}, "num_attention_heads: expected a whole number"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        from_motif({**V1, **change}, published.drawn(shapes(V1)))


def test_a_schedule_that_motif_does_not_have_is_refused():
    ours, converted = from_motif(V1, published.drawn(shapes(V1)))
    ours.lambda_layer_offset = 0
    with pytest.raises(UserError, match="lambda_layer_offset: Motif has -1, got 0"):
        to_motif(ours, converted)
