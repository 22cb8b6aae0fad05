"""Dropout of the maps: one mask for both, or one for each."""

import pytest
import torch
from operands import Geometry

from diffattn.ops import IMPLEMENTATIONS, diff_attention, softmax_attention

DROPPING = [name for name in IMPLEMENTATIONS if name not in ("blocked", "fused")]
FAST = [name for name in DROPPING if name != "reference"]


def dropped_maps(lam, masks, impl="reference", size=64, p=0.25):
    """Difference maps under dropout, read off through unit values, [size, size]; no causal."""
    q, k, _, q_noise, k_noise = Geometry(T=size, S=size, H=1, N=1, G=1, E=size).draw()
    v = torch.eye(size, dtype=torch.float64).view(1, size, 1, size)
    options = {"lam": lam, "impl": impl}
    plain = diff_attention(q, k, v, q_noise, k_noise, **options)[0, :, 0]
    dropped = diff_attention(q, k, v, q_noise, k_noise, dropout=p, dropout_masks=masks, **options)
    return plain, dropped[0, :, 0]


def test_equal_branches_under_one_shared_mask_cancel_exactly():
    q, k, v, *_ = Geometry(T=9, S=9).draw(torch.float32)
    out = diff_attention(q, k, v, q, k.clone(), lam=1.0, dropout=0.5, dropout_masks="shared")
    assert (out == 0).all()


@pytest.mark.parametrize("impl", DROPPING)
def test_equal_branches_under_independent_masks_do_not_cancel(impl):
    q, k, v, *_ = Geometry(T=9, S=9).draw(torch.float32)
    out = diff_attention(
        q, k, v, q, k.clone(), lam=1.0, dropout=0.5, dropout_masks="independent", impl=impl
    )
    assert (out != 0).any(dim=-1).float().mean() > 0.9


def test_a_shared_mask_drops_or_scales_each_entry_of_the_difference():
    plain, dropped = dropped_maps(0.6, "shared")
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75, rtol=1e-12, atol=0)
    share = kept.double().mean().item()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / 64**2) ** 0.5


def test_independent_masks_drop_each_entry_with_probability_p_squared():
    plain, dropped = dropped_maps(0.6, "independent")
    share = (dropped == 0).double().mean().item()
    p = 0.25**2
    assert abs(share - p) < 5 * (p * (1 - p) / 64**2) ** 0.5
    assert not torch.allclose(dropped[dropped != 0], plain[dropped != 0] / 0.75)


@pytest.mark.parametrize("impl", FAST)
def test_kernels_drop_each_entry_with_probability_p_squared(impl):
    _, dropped = dropped_maps(0.6, "independent", impl=impl)
    share = (dropped == 0).double().mean().item()
    p = 0.25**2
    assert abs(share - p) < 5 * (p * (1 - p) / 64**2) ** 0.5


@pytest.mark.parametrize(
    ("impl", "masks"),
    [("reference", "shared"), *((name, "independent") for name in DROPPING)],
    ids=lambda value: value,
)
def test_the_mean_over_draws_is_the_output_without_dropout(impl, masks):
    q, k, v, q_noise, k_noise = (t.expand(2000, -1, -1, -1) for t in Geometry(T=3, S=3).draw())
    out = diff_attention(
        q, k, v, q_noise, k_noise, lam=0.5, dropout=0.3, dropout_masks=masks, impl=impl
    )
    want = diff_attention(*Geometry(T=3, S=3).draw(), lam=0.5)
    error = out.std(dim=0) / 2000**0.5
    assert ((out.mean(dim=0) - want[0]).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("impl", FAST)
def test_a_shared_mask_is_refused_by_kernels(impl):
    tensors = Geometry().draw()
    with pytest.raises(NotImplementedError, match=rf"impl='{impl}' draws a dropout mask for each"):
        diff_attention(*tensors, lam=0.4, dropout=0.1, impl=impl)
    with pytest.raises(NotImplementedError, match="dropout_masks='independent'"):
        diff_attention(*tensors, lam=0.4, dropout=0.1, dropout_masks="shared", impl=impl)


def test_auto_serves_a_shared_mask():
    q, k, v, *_ = Geometry(T=9, S=9).draw()
    out = diff_attention(q, k, v, q, k.clone(), lam=1.0, dropout=0.5, impl="auto")
    assert (out == 0).all()


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_softmax_attention_drops_and_scales(impl):
    q, k, *_ = Geometry(T=64, S=64, H=1, N=1, G=1).draw()
    v = torch.eye(64, dtype=torch.float64).view(1, 64, 1, 64)
    plain = softmax_attention(q, k, v, impl=impl)
    dropped = softmax_attention(q, k, v, dropout=0.25, impl=impl)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75, rtol=1e-10, atol=0)
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / 64**2) ** 0.5


@pytest.mark.parametrize("impl", DROPPING)
def test_gradients_pass_through_dropout(impl):
    tensors = Geometry(T=9, S=9).draw(requires_grad=True)
    diff_attention(
        *tensors, lam=0.4, dropout=0.3, dropout_masks="independent", causal=True, impl=impl
    ).square().sum().backward()
    assert all(t.grad.isfinite().all() and t.grad.any() for t in tensors)


@pytest.mark.parametrize("impl", ["blocked", "fused"])
def test_one_product_for_both_maps_refuses_dropout(impl):
    tensors = Geometry(T=3, S=3).draw()
    with pytest.raises(NotImplementedError, match=f"impl='{impl}' has no dropout"):
        diff_attention(*tensors, lam=0.4, dropout=0.1, dropout_masks="independent", impl=impl)
