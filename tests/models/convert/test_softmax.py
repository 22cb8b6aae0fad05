"""Differential models that start from plain ones: acceptance case 18."""

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from diffattn.errors import UserError
from diffattn.models import DiffTransformerForCausalLM
from diffattn.models.convert import (
    deviation,
    from_softmax_v1,
    from_softmax_v2,
    refuse_stationary,
    stationary_layers,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, biases, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True)
    ),
    "mistral, window": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, sliding_window=5, head_dim=16)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2, a window in no layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=28)
    ),
    "qwen2, a window in one layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)),
}
IDS = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(0))


def plain(name="llama"):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def built(config, state):
    model = DiffTransformerForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_v2_starts_with_the_logits_of_its_source_and_every_new_parameter_moves(name):
    source = plain(name)
    model = built(*from_softmax_v2(source.config, source.state_dict()))
    with torch.no_grad():
        want = source(IDS).logits
        torch.testing.assert_close(model(IDS).logits, want, rtol=0, atol=1e-5)
    assert want.std() > 0.1
    model(IDS, labels=IDS).loss.backward()
    for layer in model.model.layers:
        width = layer.self_attn.head_dim
        signal, noise = layer.self_attn.q_proj.weight.grad.unflatten(0, (4, 2, width)).unbind(1)
        assert (signal.abs().amax((1, 2)) > 0).all()
        assert (noise.abs().amax((1, 2)) > 0).all()
        assert not torch.equal(signal, noise)
        lam = layer.self_attn.lam.lambda_proj.weight.grad
        assert (lam.abs().amax(1) > 0).all()
    refuse_stationary(model)


@pytest.mark.parametrize("name", list(MODELS))
def test_v1_of_lam_zero_would_be_the_source_and_lam_sets_the_deviation(name):
    source = plain(name)
    gaps = []
    for start in (1e-6, 0.05, 0.2):
        model = built(*from_softmax_v1(source.config, source.state_dict(), lambda_start=start))
        lam = model.model.layers[0].self_attn.lam(torch.empty(0))
        assert lam.item() == pytest.approx(start, abs=1e-7)
        gaps.append(deviation(source, model)["rms"])
    assert gaps[0] < 1e-5
    assert 100 * gaps[0] < gaps[1] < gaps[2]
    refuse_stationary(model)
    for vector in model.model.layers[0].self_attn.lam.parameters():
        vector.grad = None
    model(IDS, labels=IDS).loss.backward()
    for vector in model.model.layers[0].self_attn.lam.parameters():
        assert vector.grad.abs().max() > 0


def test_the_output_is_the_sources_minus_lam_times_the_running_mean_of_the_values():
    """Acceptance case 18, zero branch at lam 0.2."""
    source = plain()
    model = built(*from_softmax_v1(source.config, source.state_dict(), lambda_start=0.2))
    seen = {}
    for name, each in (("source", source), ("model", model)):
        attention = each.model.layers[0].self_attn
        attention.register_forward_hook(
            lambda m, a, k, out, name=name: seen.update({name: out[0], "x": (*a, *k.values())[0]}),
            with_kwargs=True,
        )
        with torch.no_grad():
            each(IDS)
    attention = source.model.layers[0].self_attn
    with torch.no_grad():
        v = attention.v_proj(seen["x"]).unflatten(-1, (2, 8)).repeat_interleave(2, dim=2)
        mean = v.cumsum(1) / torch.arange(1, 13)[None, :, None, None]
        want = seen["source"] - 0.2 * attention.o_proj(mean.flatten(2))
    torch.testing.assert_close(seen["model"], want, rtol=0, atol=1e-6)
    assert (seen["model"] - seen["source"]).abs().max() > 1e-2


def zeroed(start, vectors):
    """The start that others published: zero noise queries, zero noise keys."""
    source = plain()
    config, state = from_softmax_v1(source.config, source.state_dict(), lambda_start=start)
    for name, tensor in state.items():
        if ".k_proj." in name:
            tensor.view(2, 2, 8, -1)[:, 1] = 0.0
        if ".lam." in name and not vectors:
            tensor.zero_()
    return built(config, state)


@pytest.mark.parametrize(("start", "vectors"), [(0.0, False), (0.0, True), (0.2, True)])
def test_a_start_at_a_stationary_point_is_refused(start, vectors):
    model = zeroed(start, vectors)
    assert stationary_layers(model) == [0, 1]
    with pytest.raises(UserError, match="in 2 layers, the first is 0, no gradient reaches"):
        refuse_stationary(model)
    # and indeed: ten steps of an optimizer leave the noise branch where it is
    before = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (model.model.layers[0].self_attn.k_proj.weight - before).unflatten(0, (2, 2, 8))
    assert (moved[:, 1] == 0).all()
    assert moved[:, 0].abs().max() > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LlamaConfig(**SIZES, rope_parameters={
                "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type: our model has 'default', got 'linear'",
        ),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act: our model has silu, got 'gelu'"),
        (GPT2Config(), "model_type: expected one of .* got 'gpt2'"),
    ],
)  # fmt: skip
def test_what_our_model_does_not_have_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        from_softmax_v2(config, {})
