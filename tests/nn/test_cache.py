"""Keys and values of earlier steps: a cached run equals one run over the whole."""

import pytest
import torch

from diffattn.nn import DiffAttention, KeyValueCache, SoftmaxAttention

BUILDERS = {
    "softmax": lambda **o: SoftmaxAttention(64, num_heads=8, num_key_value_heads=4, **o),
    "v1": lambda **o: DiffAttention.v1(64, match_heads=8, layer_idx=1, **o),
    "v1-gqa": lambda **o: DiffAttention.v1(
        64, match_heads=8, match_key_value_heads=4, layer_idx=1, **o
    ),
    "v2": lambda **o: DiffAttention.v2(64, match_heads=8, match_key_value_heads=2, **o),
    "grouped": lambda **o: DiffAttention.grouped(64, match_heads=8, ratio=2, layer_idx=1, **o),
}
STEPS = {"prompt-then-single": (7, 1, 1, 1, 1, 1), "chunks": (3, 4, 5), "single": (1,) * 12}
OPTIONS = {
    "plain": {},
    "rotary": {"rope_theta": 10_000.0},
    "window": {"rope_theta": 10_000.0, "window": 4},
}


@pytest.mark.parametrize("impl", ["reference", "sdpa", "one_call", "blocked"])
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("steps", list(STEPS))
@pytest.mark.parametrize("name", list(BUILDERS))
def test_cached_equals_uncached(name, steps, options, impl):
    if name == "softmax" and impl == "one_call":
        impl = "auto"
    layer = BUILDERS[name](impl=impl, **OPTIONS[options]).double()
    x = torch.randn(2, 12, 64, dtype=torch.float64)
    cache = KeyValueCache()
    parts = [layer(chunk, cache=cache) for chunk in x.split(STEPS[steps], dim=1)]
    assert len(cache) == 12
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [("v1", (8, 8), (4, 16)), ("v1-gqa", (4, 8), (2, 16)), ("v2", (2, 8), (2, 8))],
)
def test_cached_shapes_are_the_layers_own(name, keys, values):
    cache = KeyValueCache()
    assert len(cache) == 0
    BUILDERS[name]()(torch.randn(2, 3, 64), cache=cache)
    assert cache.keys.shape == (2, 3, *keys)
    assert cache.values.shape == (2, 3, *values)


def test_explicit_positions_take_the_place_of_counting():
    layer = BUILDERS["v1"](rope_theta=10_000.0)
    x = torch.randn(2, 6, 64)
    shifted = layer(x, positions=torch.arange(40, 46))
    torch.testing.assert_close(shifted, layer(x), rtol=0, atol=1e-5)  # distance alone counts
    spread = layer(x, positions=torch.arange(6) * 3)
    assert not torch.allclose(spread, layer(x), atol=1e-4)


@pytest.mark.parametrize("name", ["v1", "v2", "grouped"])
def test_left_padding_with_a_mask_and_positions_equals_a_solo_run(name):
    layer = BUILDERS[name](rope_theta=10_000.0).double()
    x = torch.randn(1, 3, 64, dtype=torch.float64)
    padded = torch.cat((torch.randn(1, 3, 64, dtype=torch.float64), x), dim=1)
    mask = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.bool).view(1, 1, 1, 6)
    positions = torch.tensor([[0, 0, 0, 0, 1, 2]])
    got = layer(padded, mask=mask, positions=positions)
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, 3:], layer(x), rtol=0, atol=1e-12)
