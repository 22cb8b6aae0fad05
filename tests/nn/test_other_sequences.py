"""Layers beyond causal self-attention: cross-attention and bidirectional attention."""

import oracles
import pytest
import torch

from diffattn.nn import DiffAttention, KeyValueCache, SoftmaxAttention
from diffattn.ops import IMPLEMENTATIONS

OPTIONS = {"causal": False, "context_size": 24}
BUILDERS = {
    "v1": lambda **o: DiffAttention.v1(32, match_heads=4, layer_idx=1, **o),
    "v1-gqa": lambda **o: DiffAttention.v1(
        32, match_heads=8, match_key_value_heads=4, layer_idx=1, **o
    ),
    "v2": lambda **o: DiffAttention.v2(32, match_heads=4, **o),
    "grouped": lambda **o: DiffAttention.grouped(32, match_heads=8, ratio=2, layer_idx=1, **o),
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("lengths", [(7, 4), (4, 7)], ids=["T7-S4", "T4-S7"])
def test_cross_attention_with_a_key_mask_of_another_length(name, impl, lengths):
    """The last key masked equals the last key left out; every query stays."""
    layer = BUILDERS[name](impl=impl, **OPTIONS).double()
    x = torch.randn(2, lengths[0], 32, dtype=torch.float64)
    context = torch.randn(2, lengths[1], 24, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, lengths[1], dtype=torch.bool)
    mask[..., -1] = False
    got = layer(x, context, mask=mask)
    assert got.shape == x.shape
    torch.testing.assert_close(got, layer(x, context[:, :-1]), rtol=0, atol=1e-12)
    assert not torch.allclose(got, layer(x, context))


def test_cross_attention_v1_equals_the_loops():
    layer = BUILDERS["v1"](**OPTIONS).double()
    x, context = torch.randn(1, 3, 32).double(), torch.randn(1, 5, 24).double()
    with torch.no_grad():
        q = (x @ layer.q_proj.weight.T).unflatten(-1, (4, 8))
        k = (context @ layer.k_proj.weight.T).unflatten(-1, (4, 8))
        v = (context @ layer.v_proj.weight.T).unflatten(-1, (2, 16))
        lam = layer.lam(x).item()
    heads = oracles.diff_attention(
        q[:, :, 0::2], k[:, :, 0::2], v, q[:, :, 1::2], k[:, :, 1::2], lam=lam
    )
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)
    factor = 1 - oracles.depth_constant(2)
    want = (normed * factor).flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x, context), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", list(BUILDERS))
def test_bidirectional_layers_follow_a_permutation_of_the_tokens(name, impl):
    layer = BUILDERS[name](causal=False, impl=impl).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    order = torch.randperm(9)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_permuted_context_changes_nothing(name):
    layer = BUILDERS[name](**OPTIONS).double()
    x, context = torch.randn(2, 5, 32).double(), torch.randn(2, 9, 24).double()
    got = layer(x, context[:, torch.randperm(9)])
    torch.testing.assert_close(got, layer(x, context), rtol=0, atol=1e-12)


def test_softmax_layer_attends_to_a_context():
    layer = SoftmaxAttention(32, num_heads=4, **OPTIONS)
    assert layer(torch.randn(2, 5, 32), torch.randn(2, 9, 24)).shape == (2, 5, 32)


def test_a_causal_layer_refuses_a_context():
    layer = BUILDERS["v1"]()
    with pytest.raises(ValueError, match=r"^context: .* causal=False"):
        layer(torch.randn(1, 3, 32), torch.randn(1, 3, 32))


def test_a_rotary_layer_refuses_a_context():
    layer = BUILDERS["v1"](causal=False, rope_theta=10_000.0)
    with pytest.raises(ValueError, match=r"^context: .* rope_theta=None"):
        layer(torch.randn(1, 3, 32), torch.randn(1, 3, 32))


def test_a_cache_with_a_context_is_refused():
    layer = BUILDERS["v1"](causal=False)
    with pytest.raises(ValueError, match=r"^cache: "):
        layer(torch.randn(1, 3, 32), torch.randn(1, 3, 32), cache=KeyValueCache())
