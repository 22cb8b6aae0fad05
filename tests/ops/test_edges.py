"""Scales, masks and numbers at the edge of what the kernels take."""

import pytest
import torch

from diffattn import diff_attention


def operands(length=6, keys=6, dtype=torch.float32):
    torch.manual_seed(0)
    q, q_noise = torch.randn(2, 1, length, 2, 4).to(dtype)
    k, k_noise = torch.randn(2, 1, keys, 2, 4).to(dtype)
    return q, k, torch.randn(1, keys, 2, 8).to(dtype), q_noise, k_noise


@pytest.mark.parametrize("impl", ["sdpa", "one_call", "blocked"])
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_a_scale_that_is_not_positive(impl, scale):
    options = {"lam": 0.3, "causal": True, "scale": scale}
    expected = diff_attention(*operands(), impl="reference", **options)
    torch.testing.assert_close(diff_attention(*operands(), impl=impl, **options), expected)


@pytest.mark.parametrize("impl", ["sdpa", "one_call", "blocked"])
def test_a_large_bias_keeps_its_differences_in_bf16(impl):
    bias = -200.3 + 0.3 * torch.arange(64.0)[None]
    tensors = operands(64, 64, torch.bfloat16)
    expected = diff_attention(*tensors, lam=0.3, mask=bias, impl="reference")
    found = diff_attention(*tensors, lam=0.3, mask=bias, impl=impl)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.06)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "one_call", "blocked"])
def test_nan_in_a_mask_is_not_hidden(impl):
    mask = torch.zeros(64, 64)
    mask[2, 3] = float("nan")
    out = diff_attention(*operands(64, 64), lam=0.3, mask=mask, impl=impl)
    assert out[0, 2].isnan().all()
    assert out[0, 3:].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
        ({"window": 2.5}, "window: expected a whole number, at least 1, got 2.5"),
        ({"lam": [0.1, 0.2]}, "lam: expected a number or a tensor, got list"),
        ({"lam": torch.tensor(1j)}, "lam: expected a real tensor"),
        ({"mask": torch.tensor(True)}, "mask: expected a shape that broadcasts"),
    ],
)
def test_arguments_of_no_meaning(options, message):
    with pytest.raises(ValueError, match=message):
        diff_attention(*operands(), **{"lam": 0.3} | options)


def test_no_queries():
    with pytest.raises(ValueError, match="expected at least one query"):
        diff_attention(*operands(length=0), lam=0.3, causal=True)
