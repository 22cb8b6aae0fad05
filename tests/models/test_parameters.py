"""Sizes: parameter counts by formula, and the geometry that an attention kernel is told."""

import pytest
import tiny
import torch

from diffattn.models import DiffTransformerConfig, DiffTransformerForCausalLM

VOCAB, M, INNER, LAYERS, HEADS = 1000, 256, 688, 3, 8


def count(attention, tie=True, key_heads=None, **options):
    config = DiffTransformerConfig(
        vocab_size=VOCAB,
        hidden_size=M,
        num_hidden_layers=LAYERS,
        match_heads=HEADS,
        match_key_value_heads=key_heads,
        attention=attention,
        tie_word_embeddings=tie,
        **options,
    )
    assert config.intermediate_size == INNER  # 8/3 x 256 = 682.7, rounded up to 8
    with torch.device("meta"):
        model = DiffTransformerForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


def around(attention_of_a_layer, tie=True):
    """Everything outside attention: embeddings, SwiGLU, two norms a block and the last."""
    embeddings = VOCAB * M * (1 if tie else 2)
    return embeddings + LAYERS * (attention_of_a_layer + 3 * M * INNER + 2 * M) + M


D = M // HEADS
FORMULAS = {
    "softmax": ("softmax", None, 4 * M * M),
    "softmax-gqa": ("softmax", 4, 2 * M * M + 2 * M * 4 * D),
    # four square matrices, four vectors of D, a gain of 2 D
    "v1": ("v1", None, 4 * M * M + 4 * D + 2 * D),
    # keys: 2 groups x (k, k') x D; values: 2 groups x 2 D
    "v1-gqa": ("v1", 4, 2 * M * M + 2 * M * 4 * D + 6 * D),
    # twice the queries, and lambda_proj M x 8
    "v2": ("v2", None, 5 * M * M + M * HEADS),
    "v2-gqa": ("v2", 4, 3 * M * M + 2 * M * 4 * D + M * HEADS),
    # 4 signal and 2 noise heads; 2 key groups of (k, k') and of values 2 D
    "grouped": ("grouped", None, M * 6 * D + 2 * M * 4 * D + M * M + 6 * D),
}


@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_parameter_count(name, tie):
    attention, key_heads, formula = FORMULAS[name]
    assert count(attention, tie=tie, key_heads=key_heads) == around(formula, tie)


def test_v1_has_the_transformers_size_within_half_a_percent():
    softmax, v1 = count("softmax"), count("v1")
    assert v1 - softmax == LAYERS * 6 * D
    assert abs(v1 - softmax) / softmax < 0.005


def test_a_mixed_model_is_the_sum_of_its_layers():
    want = around(0) + 4 * M * M + FORMULAS["v1"][2] + FORMULAS["v2"][2]
    assert count(["softmax", "v1", "v2"]) == want


@pytest.mark.parametrize("kind", list(tiny.KINDS))
def test_no_parameter_has_zero_dimensions(kind):
    assert all(p.dim() > 0 for p in tiny.model(kind).parameters())


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        ("softmax", (8, 8, 8)),
        ("softmax-gqa", (8, 4, 8)),
        ("v1", (8, 4, 16)),
        ("v1-gqa", (8, 2, 16)),
        ("v2", (16, 8, 8)),
        ("v2-gqa", (16, 4, 8)),
        ("grouped", (6, 2, 16)),
        ("grouped-gqa", (6, 1, 16)),
    ],
)
def test_the_configuration_states_the_kernels_geometry(kind, geometry):
    config = tiny.config(kind)
    stated = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert stated == geometry


def test_initialisation_follows_the_configuration():
    model = DiffTransformerForCausalLM(
        tiny.config("mixed", hidden_size=128, initializer_range=0.05, lambda_std=0.3)
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or "subln" in name:
            assert (parameter == 1).all(), name
        elif ".lambda_" in name and "lambda_proj" not in name:
            assert parameter.dtype == torch.float32
            assert 0 < parameter.abs().max() < 5 * 0.3
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name


def test_lambda_std_zero_gives_exactly_the_depth_schedule():
    model = tiny.model("v1", lambda_std=0.0, num_hidden_layers=4)
    want = torch.tensor([0.2, 0.355509, 0.470713, 0.556058])
    got = torch.stack([layer.self_attn.lam(torch.empty(0)) for layer in model.model.layers])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    factors = [layer.self_attn.subln.factor for layer in model.model.layers]
    torch.testing.assert_close(torch.tensor(factors), 1 - want, rtol=0, atol=1e-6)
