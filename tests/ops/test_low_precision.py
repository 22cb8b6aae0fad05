"""Error budgets of low precision: no implementation loses more than plain attention loses.

The yardstick is differential attention written out in the dtype itself, as eager attention of the
field is: products in that dtype, each softmax in fp32 and rounded to it, then the difference. An
implementation may err by twice as much against fp64 in the root mean square, and by five times as
much in its worst entry (where torch's own kernel errs 3.9 times as much on processors with
AVX-512), plus one rounding of the largest output.
"""

import math

import pytest
import torch
from operands import Geometry

from diffattn.ops import IMPLEMENTATIONS, diff_attention

GEOMETRIES = [
    Geometry(B=2, T=48, S=48, H=4, N=4, G=4, D=16, E=32),
    Geometry(B=2, T=48, S=48, H=4, N=4, G=2, D=16, E=32),
    Geometry(B=2, T=48, S=48, H=4, N=4, G=2, D=16, E=16, own_key=False),
    Geometry(B=2, T=48, S=48, H=6, N=2, G=2, D=16, E=32),
    Geometry(B=1, T=9, S=160, H=4, N=2, G=2, D=32, E=32, own_key=False),
]


def eager(q, k, v, q_noise, k_noise, *, lam, causal):
    """Differential attention with every result rounded to the dtype of its operands."""
    ratio = q.shape[2] // q_noise.shape[2]
    noise = attention_map(q_noise, k if k_noise is None else k_noise, causal)
    difference = attention_map(q, k, causal) - lam * noise.repeat_interleave(ratio, dim=1)
    v = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], dim=1)
    return (difference.to(v.dtype) @ v).transpose(1, 2)


def attention_map(q, k, causal):
    q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    work = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=work).to(scores.dtype)


def results(run, tensors, upstream):
    """Output and the gradient of every operand, in fp64."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    out = run(*leaves)
    out.backward(upstream.to(out.dtype))
    return [t.double() for t in (out, *(leaf.grad for leaf in leaves if leaf is not None))]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_at_most_twice_the_error_of_eager_attention(impl, dtype, geometry, causal):
    tensors = geometry.draw(dtype)
    upstream = torch.randn(geometry.B, geometry.T, geometry.H, geometry.E).to(dtype)
    wide = [None if t is None else t.double() for t in tensors]
    exact = results(lambda *t: eager(*t, lam=0.6, causal=causal), wide, upstream.double())
    plain = results(lambda *t: eager(*t, lam=0.6, causal=causal), tensors, upstream)
    ours = results(
        lambda *t: diff_attention(*t, lam=0.6, causal=causal, impl=impl), tensors, upstream
    )
    for want, yardstick, got in zip(exact, plain, ours, strict=True):
        floor = torch.finfo(dtype).eps * want.abs().max()
        for factor, size in ((5, torch.max), (2, lambda x: x.square().mean().sqrt())):
            budget = factor * size((yardstick - want).abs()) + floor
            assert size((got - want).abs()) <= budget


def test_the_yardstick_can_be_exceeded():
    """Maps subtracted after each was rounded to 8 bits of mantissa would not pass in fp32."""
    geometry = GEOMETRIES[0]
    q, k, v, q_noise, k_noise = tensors = geometry.draw(torch.float32)
    exact = eager(*(t.double() for t in tensors), lam=0.6, causal=True)
    plain = eager(*tensors, lam=0.6, causal=True)
    coarse = eager(*(t.bfloat16() for t in (q, k, v, q_noise, k_noise)), lam=0.6, causal=True)
    budget = 5 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (coarse - exact).abs().max() > 10 * budget


SHIFTS = {"bias": 20.0, "high": 200.0, "low": -200.0, "far": 3000.0}


@pytest.mark.parametrize("shift", list(SHIFTS))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", ["sdpa", "one_call", "blocked"])
def test_a_shift_of_bias_and_sinks_costs_no_precision(impl, dtype, causal, shift):
    """Softmax ignores it, so low precision may not lose what stands behind it."""
    geometry = Geometry(B=1, T=64, S=64, H=2, N=2, G=2, D=8, E=8)
    tensors = geometry.draw(dtype)
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(1, 2, 64, 64, generator=generator) + SHIFTS[shift]
    sink = torch.full((2,), SHIFTS[shift])
    for sinks in ({}, {"sink": sink, "sink_noise": sink}):
        options = {"lam": 0.6, "causal": causal, "mask": bias, **sinks}
        want = diff_attention(*(t.double() for t in tensors), **options, impl="reference")
        plain = diff_attention(*tensors, lam=0.6, causal=causal, impl=impl).double()
        exact = diff_attention(*(t.double() for t in tensors), lam=0.6, causal=causal)
        got = diff_attention(*tensors, **options, impl=impl).double()
        budget = 3 * (plain - exact).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()
        assert (got - want).abs().max() <= budget


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_bias_beyond_the_range_of_half_precision_is_finite(impl, sinks):
    tensors = Geometry(T=4, S=4, H=2, N=2, G=2, E=4).draw(torch.float16, requires_grad=True)
    bias = torch.zeros(4, 4)
    bias[1, 2] = 7e4
    options = {"sink": torch.zeros(2), "sink_noise": torch.zeros(2)} if sinks else {}
    out = diff_attention(*tensors, lam=0.6, mask=bias, impl=impl, **options)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(t.grad.isfinite().all() for t in tensors)
    torch.testing.assert_close(out[0, 1], 0.4 * tensors[2][0, 2], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("of_sink", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_dtype_of_sinks_leaves_the_bias_alone(impl, dtype, of_sink):
    tensors = Geometry(T=6, S=6).draw(dtype)
    generator = torch.Generator().manual_seed(5)
    bias = 3 * torch.randn(1, 2, 6, 6, generator=generator, dtype=torch.float64)
    sink = torch.tensor([0.25, -0.5], dtype=of_sink)
    out = diff_attention(*tensors, lam=0.6, mask=bias, sink=sink, sink_noise=sink, impl=impl)
    want = diff_attention(
        *(t.double() for t in tensors),
        lam=0.6,
        mask=bias,
        sink=sink.double(),
        sink_noise=sink.double(),
        impl="reference",
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance)
