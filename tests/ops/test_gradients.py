"""Gradients of every public operator against finite differences, in fp64 at tiny shapes."""

import pytest
import torch
from operands import Geometry
from torch.autograd import gradcheck, gradgradcheck

from diffattn.ops import (
    IMPLEMENTATIONS,
    apply_rotary,
    diff_attention,
    diff_attention_maps,
    exponential_lambda,
    join_stripes,
    rotary_angles,
    sigmoid_lambda,
    softmax_attention,
    split_stripes,
    stack_keys,
    stack_queries,
    subtract_maps,
    subtract_outputs,
)

CASES = [
    (Geometry(T=3, S=3, D=2, E=3), {"causal": True}),
    (Geometry(T=2, S=4, H=4, N=2, G=1, D=2, E=2), {"causal": True, "window": 2}),
    (Geometry(T=4, S=2, D=1, E=2), {"causal": True}),
    (Geometry(T=3, S=3, H=2, N=2, G=1, D=2, E=2, own_key=False), {}),
]
CASE_IDS = [f"{g}-{'-'.join(o) or 'full'}" for g, o in CASES]


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("geometry", "options"), CASES, ids=CASE_IDS)
@pytest.mark.parametrize("lam", ["scalar", "head", "token"])
def test_diff_attention(impl, geometry, options, lam):
    tensors = geometry.draw(requires_grad=True)
    coefficient = geometry.lam(lam).requires_grad_()
    if tensors[-1] is None:
        inputs = (*tensors[:4], coefficient)
        assert gradcheck(lambda *t: diff_attention(*t[:4], lam=t[4], impl=impl, **options), inputs)
    else:
        inputs = (*tensors, coefficient)
        assert gradcheck(lambda *t: diff_attention(*t[:5], lam=t[5], impl=impl, **options), inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_diff_attention_with_an_empty_row(impl):
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    tensors = Geometry(T=3, S=3, D=2, E=2).draw(requires_grad=True)
    lam = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda *t: diff_attention(*t[:5], lam=t[5], mask=mask, impl=impl), (*tensors, lam)
    )


def test_reference_has_second_derivatives():
    tensors = Geometry(T=2, S=2, H=1, N=1, G=1, D=2, E=1).draw(requires_grad=True)
    assert gradgradcheck(
        lambda *t: diff_attention(*t, lam=0.3, causal=True, impl="reference"), tensors
    )


@pytest.mark.parametrize("impl", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize(("geometry", "options"), CASES[:3], ids=CASE_IDS[:3])
def test_softmax_attention(impl, geometry, options):
    tensors = geometry.draw(requires_grad=True)[:3]
    assert gradcheck(lambda *t: softmax_attention(*t, impl=impl, **options), tensors)


@pytest.mark.parametrize(("geometry", "options"), CASES[:3], ids=CASE_IDS[:3])
def test_diff_attention_maps(geometry, options):
    q, k, _, q_noise, k_noise = geometry.draw(requires_grad=True)
    assert gradcheck(lambda *t: diff_attention_maps(*t, **options), (q, k, q_noise, k_noise))


def test_exponential_lambda():
    vectors = [0.3 * t.detach() for t in leaves(*[(4,)] * 4)]
    assert gradcheck(lambda *t: exponential_lambda(*t, 0.2), [t.requires_grad_() for t in vectors])


def test_sigmoid_lambda():
    assert gradcheck(sigmoid_lambda, leaves((2, 3, 2)))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_apply_rotary(style):
    cos, sin = (t.double() for t in rotary_angles(torch.arange(3), 4))
    x, cos, sin = leaves((2, 3, 2, 4))[0], cos.requires_grad_(), sin.requires_grad_()
    assert gradcheck(lambda *t: apply_rotary(*t, style=style), (x, cos, sin))


@pytest.mark.parametrize("lam_shape", [(), (4,), (2, 3, 4)], ids=["scalar", "head", "token"])
def test_subtract_outputs(lam_shape):
    assert gradcheck(subtract_outputs, leaves((2, 3, 4, 2), (2, 3, 2, 2), lam_shape))


@pytest.mark.parametrize("lam_shape", [(), (4,), (2, 3, 4)], ids=["scalar", "head", "token"])
def test_subtract_maps(lam_shape):
    assert gradcheck(subtract_maps, leaves((2, 4, 3, 2), (2, 2, 3, 2), lam_shape))


def test_head_orders():
    signal, noise = leaves((1, 2, 4, 2), (1, 2, 2, 2))
    assert gradcheck(join_stripes, (signal, noise))
    assert gradcheck(lambda t: split_stripes(t, 2), leaves((1, 2, 6, 2)))
    assert gradcheck(lambda *t: stack_queries(*t, own_noise_key=True), (signal, noise))
    assert gradcheck(stack_keys, leaves((1, 2, 2, 2), (1, 2, 2, 2)))
