"""Function transforms over the reference operator and over a layer."""

import torch
from torch.func import functional_call, grad, jacrev, vmap

from diffattn.nn import DiffAttention
from diffattn.ops import diff_attention


def operands(*leading):
    shapes = ((5, 4, 3), (5, 2, 3), (5, 2, 6), (5, 2, 3), (5, 2, 3))
    return [torch.randn(*leading, 1, *shape, dtype=torch.float64) for shape in shapes]


def reference(*tensors, lam=0.3):
    return diff_attention(*tensors, lam=lam, causal=True, impl="reference")


def test_vmap_equals_a_loop():
    stacked = operands(3)
    want = torch.stack([reference(*(t[i] for t in stacked)) for i in range(3)])
    torch.testing.assert_close(vmap(reference)(*stacked), want, rtol=0, atol=1e-13)


def test_vmap_over_lam_equals_a_loop():
    tensors = operands()
    lams = torch.tensor([0.0, 0.4, 0.9], dtype=torch.float64)
    got = vmap(lambda lam: reference(*tensors, lam=lam))(lams)
    want = torch.stack([reference(*tensors, lam=lam) for lam in lams])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_vmap_and_grad_take_caps_and_sinks():
    stacked = operands(3)
    sinks = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

    def loss(sink, sink_noise, *tensors):
        out = diff_attention(
            *tensors, lam=0.3, causal=True, window=3, softcap=2.0, sink=sink,
            sink_noise=sink_noise, impl="reference",
        )  # fmt: skip
        return out.square().sum()

    got = vmap(grad(loss, argnums=(0, 1, 2)))(*sinks, *stacked)
    for i in range(3):
        leaves = [t[i].clone().requires_grad_() for t in (*sinks, *stacked)]
        want = torch.autograd.grad(loss(*leaves), leaves[:3])
        for one, two in zip(got, want, strict=True):
            assert two.abs().max() > 0
            torch.testing.assert_close(one[i], two, rtol=0, atol=1e-13)


def test_grad_equals_backward():
    tensors = [t.requires_grad_() for t in operands()]
    got = grad(lambda *t: reference(*t).square().sum(), argnums=tuple(range(5)))(*tensors)
    want = torch.autograd.grad(reference(*tensors).square().sum(), tensors)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-13)


def test_gradients_of_each_example_equal_separate_backward_passes():
    stacked = operands(3)
    got = vmap(grad(lambda *t: reference(*t).square().sum()))(*stacked)
    for i in range(3):
        q, *rest = (t[i].clone() for t in stacked)
        q.requires_grad_()
        (want,) = torch.autograd.grad(reference(q, *rest).square().sum(), q)
        torch.testing.assert_close(got[i], want, rtol=0, atol=1e-13)


def test_jacobian_of_lam_is_minus_the_noise_output():
    tensors = operands()
    lam = torch.tensor(0.3, dtype=torch.float64)
    got = jacrev(lambda value: reference(*tensors, lam=value))(lam)
    want = reference(*tensors, lam=1.0) - reference(*tensors, lam=0.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_a_layer_under_functional_call_and_grad():
    layer = DiffAttention.v1(16, match_heads=4, layer_idx=0, impl="reference")
    x = torch.randn(2, 4, 16)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).square().sum()

    got = grad(loss)(parameters, x)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-6)
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for name, value in each.items():
        torch.testing.assert_close(value.sum(0), got[name], rtol=1e-4, atol=1e-5)
