"""Error budgets of low precision: no implementation loses more than plain attention loses.

The yardstick is differential attention written out in the dtype itself, as eager attention of the
field is: products in that dtype, each softmax in fp32 and rounded to it, then the difference. An
implementation may err by twice as much against fp64, plus one rounding of the largest output.
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
        for size in (torch.max, lambda x: x.square().mean().sqrt()):
            budget = 2 * size((yardstick - want).abs()) + floor
            assert size((got - want).abs()) <= budget


def test_the_yardstick_can_be_exceeded():
    """Maps subtracted after each was rounded to 8 bits of mantissa would not pass in fp32."""
    geometry = GEOMETRIES[0]
    q, k, v, q_noise, k_noise = tensors = geometry.draw(torch.float32)
    exact = eager(*(t.double() for t in tensors), lam=0.6, causal=True)
    plain = eager(*tensors, lam=0.6, causal=True)
    coarse = eager(*(t.bfloat16() for t in (q, k, v, q_noise, k_noise)), lam=0.6, causal=True)
    budget = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (coarse - exact).abs().max() > 10 * budget
