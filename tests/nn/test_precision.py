"""Precision: lam stays in fp32, outputs keep the dtype of their inputs."""

import math

import pytest
import torch
from torch import nn

from diffattn.nn import DiffAttention, RMSNorm, SoftmaxAttention
from diffattn.ops import IMPLEMENTATIONS

BUILDERS = {
    "softmax": lambda **o: SoftmaxAttention(32, num_heads=4, **o),
    "v1": lambda **o: DiffAttention.v1(32, match_heads=4, layer_idx=0, **o),
    "v2": lambda **o: DiffAttention.v2(32, match_heads=4, **o),
    "grouped": lambda **o: DiffAttention.grouped(32, match_heads=8, ratio=2, layer_idx=0, **o),
    "grouped_latent": lambda **o: DiffAttention.grouped_latent(
        32, match_heads=4, ratio=2, lam_per="group", **o
    ),
    "options": lambda **o: DiffAttention.v1(
        32,
        match_heads=4,
        layer_idx=0,
        lam_per="head",
        qk_norm=True,
        output_gate=True,
        bias=True,
        **o,
    ),
}
DIFFERENTIAL = [name for name in BUILDERS if name != "softmax"]


def with_dot_products(layer, first, second=0.0):
    """Set the lambda vectors so that lq1.lk1 = first and lq2.lk2 = second."""
    with torch.no_grad():
        for parameter in layer.lam.parameters():
            parameter.zero_()
        layer.lam.lambda_q1[0], layer.lam.lambda_k1[0] = 1.0, first
        layer.lam.lambda_q2[0], layer.lam.lambda_k2[0] = 1.0, second
    return layer


@pytest.mark.parametrize(
    "cast",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.bfloat16(),
        lambda layer: layer.half(),
        lambda layer: layer.to(device="cpu", dtype=torch.bfloat16),
        lambda layer: nn.Sequential(layer).bfloat16()[0],
    ],
    ids=["to-bf16", "bfloat16", "half", "to-device-bf16", "inside-a-model"],
)
def test_lam_of_a_cast_layer_is_exact(cast):
    """Acceptance case 4: 0.203005 within 1e-5, where early rounding gives 0.2002."""
    layer = cast(with_dot_products(BUILDERS["v1"](), 0.003))
    lam = layer.lam(torch.zeros(1, 1, 32, dtype=layer.q_proj.weight.dtype))
    assert layer.q_proj.weight.dtype.itemsize == 2
    assert lam.dtype == torch.float32
    assert lam.item() == pytest.approx(0.203005, abs=1e-5)
    assert lam.item() == pytest.approx(math.exp(0.003) - 0.8, abs=1e-7)


@pytest.mark.parametrize("name", DIFFERENTIAL)
@pytest.mark.parametrize("method", ["bfloat16", "half", "float", "double"])
def test_lambda_parameters_survive_casts_bitwise(name, method):
    layer = BUILDERS[name]()
    before = {key: p.detach().clone() for key, p in layer.lam.named_parameters()}
    buffers = {key: b.clone() for key, b in layer.lam.named_buffers()}
    getattr(layer, method)()
    wide = torch.float64 if method == "double" else torch.float32
    for key, parameter in layer.lam.named_parameters():
        assert parameter.dtype == wide
        assert torch.equal(parameter.detach().to(torch.float32), before[key])
    for key, buffer in layer.lam.named_buffers():
        assert buffer.dtype == wide
        assert torch.equal(buffer.to(torch.float32), buffers[key])


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_output_dtype_is_input_dtype(name, dtype, impl):
    if name == "softmax" and impl == "one_call":
        impl = "auto"
    layer = BUILDERS[name](impl=impl, rope_theta=10_000.0).to(dtype)
    x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
    out = layer(x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert x.grad.dtype == dtype
    for parameter in layer.parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_fp32_weights_in_bf16_autocast(name, impl, masked):
    """Acceptance case 12: forward and backward, bf16 into the output projection, lam fp32."""
    if name == "softmax" and impl == "one_call":
        impl = "auto"
    layer = BUILDERS[name](impl=impl, rope_theta=10_000.0)
    seen = {}
    layer.o_proj.register_forward_pre_hook(lambda m, args: seen.update(o_proj=args[0].dtype))
    if name != "softmax":
        layer.lam.register_forward_hook(lambda m, args, out: seen.update(lam=out.dtype))
    x = torch.randn(2, 5, 32, requires_grad=True)
    mask = torch.randn(2, 1, 5, 5) if masked else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, mask=mask)
    assert out.dtype == torch.float32
    assert seen["o_proj"] == torch.bfloat16
    assert seen.get("lam", torch.float32) == torch.float32
    out.square().sum().backward()
    assert x.grad.dtype == torch.float32
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
    torch.testing.assert_close(out, layer(x, mask=mask), rtol=0, atol=0.05)


def test_lam_is_exact_in_autocast():
    layer = with_dot_products(BUILDERS["v1"](), 0.003)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lam = layer.lam(torch.zeros(1, 1, 32))
    assert lam.item() == pytest.approx(math.exp(0.003) - 0.8, abs=1e-7)


def test_sigmoid_lam_is_fp32_exact_in_autocast_and_in_bf16_models():
    layer = BUILDERS["v2"]()
    x = torch.randn(2, 5, 32).bfloat16()
    want = (x.double() @ layer.lam.lambda_proj.weight.double().T).sigmoid()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer.lam(x)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.bfloat16().lam(x).double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_norm_keeps_dtype_and_takes_statistics_in_fp32(dtype):
    norm = RMSNorm(64)
    x = (torch.randn(3, 64) * 300).to(dtype)  # squares beyond fp16
    got = norm(x)
    assert got.dtype == dtype
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        got.double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
    )


def test_norm_under_autocast_returns_the_inputs_dtype():
    norm = RMSNorm(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert norm(torch.randn(2, 8)).dtype == torch.float32
