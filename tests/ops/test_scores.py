"""Soft cap, sinks and bias against the loops, in every implementation that takes them."""

import math

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operands import Geometry, geometries

from diffattn.ops import IMPLEMENTATIONS, diff_attention, diff_attention_maps, softmax_attention

pytestmark = pytest.mark.laws
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
impls = st.sampled_from(IMPLEMENTATIONS)


def sinks(geometry):
    generator = torch.Generator().manual_seed(geometry.seed + 3)
    draw = torch.randn(geometry.H + geometry.N, generator=generator, dtype=torch.float64) * 2
    return {"sink": draw[: geometry.H], "sink_noise": draw[geometry.H :]}


@given(geometries(max_length=4), st.floats(0.1, 50.0), st.booleans(), st.booleans())
def test_soft_cap_equals_the_loops(geometry, cap, causal, with_sinks):
    q, k, v, q_noise, k_noise = (None if t is None else 3 * t for t in geometry.draw())
    options = {"lam": geometry.lam("token"), "causal": causal, "softcap": cap}
    options |= sinks(geometry) if with_sinks else {}
    want = oracles.diff_attention(q, k, v, q_noise, k_noise, **options)
    torch.testing.assert_close(diff_attention(q, k, v, q_noise, k_noise, **options), want, **CLOSE)


def test_soft_cap_bounds_every_score():
    q, k, _, q_noise, k_noise = Geometry(T=7, S=7).draw()
    maps = diff_attention_maps(1e4 * q, k, 1e4 * q_noise, k_noise, softcap=2.0)
    for weights in maps:  # no two weights of a row are further apart than e^(2 c)
        assert (weights.amax(-1) / weights.amin(-1)).max() <= math.exp(4.0) + 1e-9
        assert weights.amin() > 0


def test_a_large_cap_changes_nothing():
    geometry = Geometry(T=7, S=7)
    q, k, v, q_noise, k_noise = geometry.draw()
    plain = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, impl="reference")
    capped = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, softcap=1e6)
    torch.testing.assert_close(capped, plain, rtol=0, atol=1e-10)


@given(geometries(max_length=4), impls, st.booleans(), st.sampled_from([None, 1, 3]))
def test_sinks_equal_the_loops(geometry, impl, causal, window):
    q, k, v, q_noise, k_noise = geometry.draw()
    options = {"lam": geometry.lam("head"), "causal": causal, "window": window, **sinks(geometry)}
    want = oracles.diff_attention(q, k, v, q_noise, k_noise, **options)
    got = diff_attention(q, k, v, q_noise, k_noise, impl=impl, **options)
    torch.testing.assert_close(got, want, **CLOSE)


@given(geometries(max_length=4), impls, st.booleans(), st.booleans(), st.booleans())
def test_drawn_masks_equal_the_loops(geometry, impl, causal, by_head, with_sinks):
    """Bool masks, rows without a visible key among them, and a bias beside them."""
    by_head = by_head and geometry.N == geometry.H
    shape = (geometry.B, geometry.H if by_head else 1, geometry.T, geometry.S)
    mask = geometry.bool_mask(shape, share=0.5)
    bias = torch.randn(
        shape, generator=torch.Generator().manual_seed(geometry.seed), dtype=torch.float64
    )
    q, k, v, q_noise, k_noise = geometry.draw()
    options = {"lam": geometry.lam("token"), "causal": causal}
    options |= sinks(geometry) if with_sinks else {}
    full = (geometry.B, geometry.H, geometry.T, geometry.S)
    want = oracles.diff_attention(
        q, k, v, q_noise, k_noise, mask=mask.expand(full), bias=bias.expand(full), **options
    )
    additive = bias.masked_fill(~mask, float("-inf"))
    got = diff_attention(q, k, v, q_noise, k_noise, mask=additive, impl=impl, **options)
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("impl", ["sdpa", "one_call"])
@pytest.mark.parametrize("own_key", [True, False], ids=["own-key", "shared-key"])
def test_gradients_with_sinks_and_a_bias_equal_the_references(impl, own_key):
    geometry = Geometry(B=2, T=5, S=7, H=4, N=2, G=2, own_key=own_key)

    def gradients(impl):
        tensors = geometry.draw(requires_grad=True)
        q, k, v, q_noise, k_noise = tensors
        logits = {name: t.clone().requires_grad_() for name, t in sinks(geometry).items()}
        bias = torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7).requires_grad_()
        out = diff_attention(
            q, k, v, q_noise, k_noise, lam=0.4, causal=True, mask=bias, impl=impl, **logits
        )
        inputs = [t for t in (*tensors, *logits.values(), bias) if t is not None]
        return torch.autograd.grad(out.square().sum(), inputs)

    for got, want in zip(gradients(impl), gradients("reference"), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
        assert want.abs().max() > 1e-3


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocked"])
def test_softmax_attention_with_a_sink_is_attention_over_one_more_key_without_a_value(impl):
    q, k, v = torch.randn(3, 2, 6, 2, 4, dtype=torch.float64).unbind(0)
    sink = torch.tensor([0.3, -1.2], dtype=torch.float64)
    got = softmax_attention(q, k, v, sink=sink, impl=impl)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 2
    total = scores.exp().sum(-1, keepdim=True) + sink.exp()[None, :, None, None]
    want = torch.einsum("bhts,bshd->bthd", scores.exp() / total, v)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [3, 9, 300])
def test_nan_in_a_query_shows_in_its_output_alone(impl, length):
    q, k, v, q_noise, k_noise = Geometry(T=length, S=length).draw()
    q[0, 1, 0, 0] = float("nan")
    out = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, causal=True, impl=impl)
    assert out[0, 1, 0].isnan().all()
    out[0, 1, 0] = 0.0
    assert out.isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_keys_that_no_query_sees_may_hold_nan(impl, kind):
    """Slots of a cache that are not in use: values of zero weight, gradients of zero."""
    geometry = Geometry(B=2, T=3, S=8, H=4, N=4, G=2)
    tensors = geometry.draw()
    mask = torch.zeros(2, 1, 3, 8, dtype=torch.bool)
    mask[0, ..., :5], mask[1, ..., 2:6] = True, True
    given = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    want = diff_attention(*tensors, lam=0.3, mask=given, impl=impl)
    unused = ~mask[:, 0, 0]
    poisoned = [t.clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        for index in (1, 2, 4):  # k, v, k_noise
            poisoned[index][unused] = float("nan")
    got = diff_attention(*poisoned, lam=0.3, mask=given, impl=impl)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for tensor, gradient in zip(
        poisoned, torch.autograd.grad(got.square().sum(), poisoned), strict=True
    ):
        assert gradient.isfinite().all()
        if tensor.shape[1] == 8:
            assert (gradient[unused] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap: expected a number above 0, got 0.0"),
        ({"softcap": float("inf")}, "softcap: expected a number above 0, got inf"),
        ({"sink": torch.zeros(2)}, "sink_noise: expected a sink for both maps or for neither"),
        ({"sink_noise": torch.zeros(2)}, "sink: expected a sink for both maps or for neither"),
        (
            {"sink": torch.zeros(3), "sink_noise": torch.zeros(2)},
            r"sink: expected one floating logit a head, \[2\], got torch.float32 of shape \(3,\)",
        ),
        (
            {"sink": torch.zeros(2), "sink_noise": torch.zeros(2, dtype=torch.long)},
            r"sink_noise: expected one floating logit a head, \[2\], got torch.int64",
        ),
    ],
)
def test_caps_and_sinks_of_no_meaning(options, message):
    with pytest.raises(ValueError, match=message):
        diff_attention(*Geometry().draw(), lam=0.3, **options)
