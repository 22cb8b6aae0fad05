"""The reference against the loops of `oracles` and against cases worked by hand."""

import math

import oracles
import pytest
import torch
from operands import Geometry

from diffattn.nn import RMSNorm
from diffattn.ops import (
    IMPLEMENTATIONS,
    diff_attention,
    diff_attention_maps,
    exponential_lambda,
    lambda_init,
    sigmoid_lambda,
    softmax_attention,
    subtract_maps,
    subtract_outputs,
)

TOLERANCE = {"rtol": 0, "atol": 1e-12}

CASES = [
    (Geometry(), {}, "number"),
    (Geometry(B=2, H=4, N=4, G=2), {"causal": True}, "head"),
    (Geometry(H=6, N=2, G=1, E=8), {"causal": True}, "token"),
    (Geometry(H=4, N=2, G=2, own_key=False), {"causal": True}, "token"),
    (Geometry(H=4, N=4, G=1, own_key=False, E=4), {}, "scalar"),
    (Geometry(T=1, S=1), {"causal": True}, "head"),
    (Geometry(T=3, S=3, B=2), {"causal": True, "window": 2}, "token"),
    (Geometry(T=3, S=9), {"causal": True}, "number"),
    (Geometry(T=9, S=4), {"causal": True}, "number"),
    (Geometry(T=4, S=9), {"window": 3}, "head"),
    (Geometry(T=9, S=4), {"window": 2}, "head"),
    (Geometry(T=63, S=63, D=3, E=3), {"causal": True, "window": 17}, "token"),
    (Geometry(T=127, S=127, D=2, E=2, G=1), {"causal": True}, "head"),
    (Geometry(T=5, S=127, D=2, E=4), {"causal": True}, "token"),
    (Geometry(), {"scale": 0.9}, "number"),
]


@pytest.mark.parametrize(
    ("geometry", "options", "lam"),
    CASES,
    ids=[f"{g}-{'-'.join(o) or 'plain'}-lam_{lam}" for g, o, lam in CASES],
)
def test_reference_equals_the_loops(geometry, options, lam):
    q, k, v, q_noise, k_noise = geometry.draw()
    options = {**options, "lam": geometry.lam(lam)}
    got = diff_attention(q, k, v, q_noise, k_noise, impl="reference", **options)
    want = oracles.diff_attention(q, k, v, q_noise, k_noise, **options)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 7), (7, 3)], ids=["T5-S5", "T3-S7", "T7-S3"])
def test_reference_equals_the_loops_under_a_mask_of_each_head(T, S, causal):
    geometry = Geometry(B=2, T=T, S=S, H=4, N=4, G=2)
    q, k, v, q_noise, k_noise = geometry.draw()
    options = {"lam": 0.6, "mask": geometry.bool_mask(), "causal": causal}
    got = diff_attention(q, k, v, q_noise, k_noise, impl="reference", **options)
    torch.testing.assert_close(
        got, oracles.diff_attention(q, k, v, q_noise, k_noise, **options), **TOLERANCE
    )


def test_maps_equal_the_loops():
    geometry = Geometry(H=6, N=2, G=2, T=4, S=6)
    q, k, _, q_noise, k_noise = geometry.draw()
    lam = geometry.lam("token")
    signal, noise = diff_attention_maps(q, k, q_noise, k_noise, causal=True)
    want = oracles.difference_map(q, k, q_noise, k_noise, lam=lam, causal=True)
    assert signal.shape == (1, 6, 4, 6)
    assert noise.shape == (1, 2, 4, 6)
    torch.testing.assert_close(subtract_maps(signal, noise, lam), want, **TOLERANCE)


def hand_case():
    """Acceptance case 1: one pair of width 1 and two tokens."""
    rows = ((0.0, 1.0), (math.log(3.0), 0.0), (0.0, 0.0), (1.0, 1.0))
    q, k, q_noise, k_noise = (
        torch.tensor(row, dtype=torch.float64).view(1, 2, 1, 1) for row in rows
    )
    v = torch.tensor(((4.0, 0.0), (0.0, 4.0)), dtype=torch.float64).view(1, 2, 1, 2)
    return q, k, v, q_noise, k_noise


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_hand_map_before_and_after_the_norm(impl):
    out = diff_attention(*hand_case(), lam=0.25, causal=True, impl=impl)
    want = torch.tensor(((3.0, 0.0), (2.5, 0.5)), dtype=torch.float64)
    torch.testing.assert_close(out.view(2, 2), want, **TOLERANCE)
    normed = RMSNorm(2, eps=0.0).double()(out).view(2, 2)
    want = torch.tensor(((1.41421, 0.0), (1.38675, 0.27735)), dtype=torch.float64)
    torch.testing.assert_close(normed, want, rtol=0, atol=5e-6)
    want = torch.tensor(((1.13137, 0.0), (1.10940, 0.22188)), dtype=torch.float64)
    torch.testing.assert_close(normed * (1 - lambda_init(0)), want, rtol=0, atol=5e-6)


def test_hand_map_keeps_a_negative_weight():
    q, k, _, q_noise, k_noise = hand_case()
    difference = subtract_maps(*diff_attention_maps(q, k, q_noise, k_noise, causal=True), 0.9)
    want = torch.tensor(((0.1, 0.0), (0.3, -0.2)), dtype=torch.float64)
    torch.testing.assert_close(difference.view(2, 2), want, **TOLERANCE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("lam", [0.2, 0.7, 1.5])
def test_first_token_is_its_value_times_one_minus_lam(impl, lam):
    q, k, v, q_noise, k_noise = Geometry(T=6, S=6).draw()
    first = diff_attention(q, k, v, q_noise, k_noise, lam=lam, causal=True, impl=impl)[:, 0]
    torch.testing.assert_close(first, (1 - lam) * v[:, 0], **TOLERANCE)
    normed, unit = RMSNorm(6, eps=0.0).double()(torch.stack((first, v[:, 0])))
    torch.testing.assert_close(normed, math.copysign(1.0, 1 - lam) * unit, **TOLERANCE)


@pytest.mark.parametrize(
    ("layer", "value"),
    [(0, 0.2), (1, 0.355509), (2, 0.470713), (3, 0.556058), (27, 0.799818)],
)
def test_depth_schedule(layer, value):
    assert round(lambda_init(layer), 6) == value
    assert lambda_init(layer) == pytest.approx(oracles.depth_constant(layer + 1), abs=1e-15)


@pytest.mark.parametrize(
    ("layer", "offset", "value"), [(0, -1, -0.0099), (0, 1, 0.3555)], ids=["motif", "dragon"]
)
def test_depth_schedule_of_other_checkpoints(layer, offset, value):
    assert lambda_init(layer, offset=offset) == pytest.approx(value, abs=5e-5)


def test_depth_schedule_refuses_a_negative_layer():
    with pytest.raises(ValueError, match=r"layer_idx: .* got -1"):
        lambda_init(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lam_is_exact_to_fp32_for_vectors_of_any_dtype(dtype):
    q1, k1, q2, k2 = torch.zeros(4, 32, dtype=dtype).unbind(0)
    q1[0], k1[0] = 1.0, 0.003
    lam = exponential_lambda(q1, k1, q2, k2, 0.2)
    assert lam.dtype == torch.float32
    assert lam.item() == pytest.approx(0.203005, abs=1e-5)  # rounding early gives 0.2002


def test_lam_is_exact_to_fp32_under_autocast():
    q1, k1, q2, k2 = torch.zeros(4, 32).unbind(0)
    q1[0], k1[0] = 1.0, 0.003
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lam = exponential_lambda(q1, k1, q2, k2, 0.2)
    assert lam.dtype == torch.float32
    assert lam.item() == pytest.approx(math.exp(0.003) - 0.8, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lam_kind", ["number", "scalar", "head", "token"])
def test_the_subtraction_is_rounded_once(dtype, lam_kind):
    """Neither lam nor its product with the noise is rounded to the inputs' dtype."""
    geometry = Geometry(B=2, T=33, H=6, N=2, E=16)
    signal, noise = torch.randn(2, 33, 6, 16).to(dtype), torch.randn(2, 33, 2, 16).to(dtype)
    lam = geometry.lam(lam_kind, torch.float32)
    got = subtract_outputs(signal, noise, lam)
    assert got.dtype == dtype
    exact_lam = torch.as_tensor(lam, dtype=torch.float64).expand(2, 33, 6)[..., None]
    exact = signal.double() - exact_lam * noise.double().repeat_interleave(3, dim=2)
    assert (got != exact.to(dtype)).double().mean() < 0.005  # fp32 against fp64 at a tie


def test_sigmoid_lambda_is_fp32_for_bf16_logits():
    logits = torch.tensor([[[0.0, 3.0, -5.0]]], dtype=torch.bfloat16)
    lam = sigmoid_lambda(logits)
    assert lam.dtype == torch.float32
    want = torch.tensor([[[0.5, 1 / (1 + math.exp(-3)), 1 / (1 + math.exp(5))]]])
    torch.testing.assert_close(lam, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_maps_are_fp32_or_better(dtype):
    q, k, _, q_noise, k_noise = Geometry().draw(dtype)
    for weights in diff_attention_maps(q, k, q_noise, k_noise):
        assert weights.dtype == torch.promote_types(dtype, torch.float32)


def test_maps_are_fp32_under_autocast():
    q, k, _, q_noise, k_noise = Geometry().draw(torch.float32)
    plain = diff_attention_maps(q, k, q_noise, k_noise)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = diff_attention_maps(q, k, q_noise, k_noise)
    for got, want in zip(cast, plain, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_softmax_attention_equals_the_loops(impl):
    geometry = Geometry(B=2, T=4, S=7, H=4, G=2)
    q, k, v, *_ = geometry.draw()
    for options in ({}, {"causal": True}, {"causal": True, "window": 2}):
        got = softmax_attention(q, k, v, impl=impl, **options)
        want = oracles.diff_attention(q, k, v, q, lam=0.0, **options)
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_one_query_sees_every_earlier_key(impl):
    q, k, v, q_noise, k_noise = Geometry(T=4, S=4).draw()
    whole = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, causal=True, impl=impl)
    last = diff_attention(q[:, 3:], k, v, q_noise[:, 3:], k_noise, lam=0.4, causal=True, impl=impl)
    torch.testing.assert_close(last, whole[:, 3:], **TOLERANCE)
