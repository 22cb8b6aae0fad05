"""Conversions against the counterpart that transformers ships: same weights, same logits."""

import pytest
import torch

pytest.importorskip("transformers", reason="models need the extra hf")

from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diffattn.errors import UserError
from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM
from diffattn.models.convert import from_diffllama, to_diffllama


def diffllama(kv_heads=8, **changes):
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "lambda_std_dev": 0.3,
        "pad_token_id": 0,
    }
    return DiffLlamaForCausalLM(DiffLlamaConfig(**settings | changes)).eval()


def ours(**changes):
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "match_heads": 8,
        "pad_token_id": 0,
    }
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**settings | changes)).eval()
    for layer in model.model.layers:
        gain = layer.self_attn.subln.weight
        torch.nn.init.uniform_(gain, 0.5, 3.0)
    return model


def loaded(config, state):
    model = DiffTransformerForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


IDS = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_diffllama_has_the_same_logits_and_tokens(kv_heads, tied):
    theirs = diffllama(kv_heads, tie_word_embeddings=tied)
    model = loaded(*from_diffllama(theirs.config, theirs.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-6)
    mask = torch.ones_like(IDS[:, :5])
    a, b = (
        m.generate(IDS[:, :5], attention_mask=mask, max_new_tokens=20, do_sample=False)
        for m in (theirs, model)
    )
    assert torch.equal(a, b)


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_there_and_back_is_bitwise(kv_heads):
    theirs = diffllama(kv_heads)
    config, state = to_diffllama(*from_diffllama(theirs.config, theirs.state_dict()))
    assert config.num_key_value_heads == kv_heads
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_the_layouts_are_not_the_same():
    # the shapes agree, so loading one as the other raises nothing: only the order tells
    theirs = diffllama()
    config, state = from_diffllama(theirs.config, theirs.state_dict())
    for name in state:
        if name in theirs.state_dict():
            state[name] = theirs.state_dict()[name]
    with torch.no_grad():
        gap = (loaded(config, state)(IDS).logits - theirs(IDS).logits).abs().max()
    assert gap > 1e-3


@pytest.mark.parametrize("kv_heads", [None, 4])
def test_the_gain_is_folded_and_the_embedding_scale_too(kv_heads):
    model = ours(match_key_value_heads=kv_heads)
    config, state = to_diffllama(model.config, model.state_dict())
    theirs = DiffLlamaForCausalLM(config).eval()
    theirs.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_bias": True}, "attention_bias: our model has no biases"),
        ({"hidden_act": "gelu"}, "hidden_act: our model has silu, got 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type: our model has 'default', got 'linear'",
        ),
    ],
)
def test_what_our_model_does_not_have_is_refused(config, message):
    theirs = diffllama(**config)
    with pytest.raises(UserError, match=message):
        from_diffllama(theirs.config, theirs.state_dict())


def test_what_diffllama_does_not_have_is_refused():
    mixed = ours(attention=["v1", "v1", "v1"], lambda_start=0.8)
    with pytest.raises(UserError, match=r"lambda_start: DiffLlama has None, got 0\.8"):
        to_diffllama(mixed.config, mixed.state_dict())
    v2 = DiffTransformerForCausalLM(
        DiffTransformerConfig(vocab_size=9, hidden_size=32, match_heads=4, attention="v2")
    )
    with pytest.raises(UserError, match="attention: DiffLlama holds v1 alone, but layer 0 is v2"):
        to_diffllama(v2.config, v2.state_dict())


def test_a_mislabelled_checkpoint_is_refused():
    model = ours()
    with pytest.raises(UserError, match=r"diffllama lacks model.layers.0.self_attn.lambda_k1"):
        from_diffllama(diffllama().config, model.state_dict())
    theirs = diffllama()
    state = theirs.state_dict() | {"model.layers.0.self_attn.bias": torch.zeros(3)}
    with pytest.raises(UserError, match=r"diffllama has no tensor model.layers.0.self_attn.bias"):
        from_diffllama(theirs.config, state)
    state = theirs.state_dict()
    state["model.norm.weight"] = torch.ones(3)
    with pytest.raises(UserError, match=r"expected model.norm.weight of shape \(64,\), got \(3,\)"):
        from_diffllama(theirs.config, state)
