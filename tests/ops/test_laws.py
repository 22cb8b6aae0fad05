"""Laws of differential attention on drawn shapes, for every implementation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operands import Geometry, geometries

from diffattn.ops import (
    IMPLEMENTATIONS,
    diff_attention,
    diff_attention_maps,
    softmax_attention,
    subtract_maps,
)

pytestmark = pytest.mark.laws
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
impls = st.sampled_from(IMPLEMENTATIONS)
lams = st.floats(-1.5, 1.5, allow_nan=False)


def repeated(tensor, times):
    return tensor.repeat_interleave(times, dim=2)


@given(geometries(), impls, st.booleans())
def test_lam_zero_is_softmax_attention(geometry, impl, causal):
    q, k, v, q_noise, k_noise = geometry.draw()
    got = diff_attention(q, k, v, q_noise, k_noise, lam=0.0, causal=causal, impl=impl)
    torch.testing.assert_close(
        got, softmax_attention(q, k, v, causal=causal, impl="reference"), **CLOSE
    )


@given(geometries(), impls, lams, st.booleans())
def test_equal_branches_give_one_minus_lam_times_attention(geometry, impl, lam, causal):
    q, k, v, q_noise, _ = geometry.draw()
    q = repeated(q_noise, geometry.H // geometry.N)
    noise_keys = k.clone() if geometry.own_key else None
    got = diff_attention(q, k, v, q_noise, noise_keys, lam=lam, causal=causal, impl=impl)
    want = (1 - lam) * softmax_attention(q, k, v, causal=causal, impl="reference")
    torch.testing.assert_close(got, want, **CLOSE)


@given(geometries(), st.sampled_from(["number", "scalar", "head", "token"]))
def test_rows_of_the_difference_map_sum_to_one_minus_lam(geometry, kind):
    q, k, _, q_noise, k_noise = geometry.draw()
    lam = geometry.lam(kind)
    difference = subtract_maps(*diff_attention_maps(q, k, q_noise, k_noise), lam)
    full = torch.as_tensor(lam, dtype=torch.float64).expand(geometry.B, geometry.T, geometry.H)
    torch.testing.assert_close(difference.sum(-1), 1 - full.transpose(1, 2), **CLOSE)


@given(geometries(), impls, st.data())
def test_a_future_token_changes_nothing_earlier(geometry, impl, data):
    q, k, v, q_noise, k_noise = geometry.draw()
    lam = geometry.lam("token")
    before = diff_attention(q, k, v, q_noise, k_noise, lam=lam, causal=True, impl=impl)
    token = data.draw(st.integers(0, geometry.S - 1))
    for tensor in (k, v, k_noise):
        if tensor is not None:
            tensor[:, token:] += 3.0
    after = diff_attention(q, k, v, q_noise, k_noise, lam=lam, causal=True, impl=impl)
    first = max(0, token - (geometry.S - geometry.T))  # the query that stands at this key
    torch.testing.assert_close(after[:, :first], before[:, :first], **CLOSE)
    if first < geometry.T and token - (geometry.S - geometry.T) >= 0:
        assert not torch.equal(after[:, first:], before[:, first:])


@given(geometries(), impls, st.integers(1, 4))
def test_a_token_outside_the_window_changes_nothing(geometry, impl, window):
    q, k, v, q_noise, k_noise = geometry.draw()
    options = {"lam": 0.4, "causal": True, "window": window, "impl": impl}
    before = diff_attention(q, k, v, q_noise, k_noise, **options)
    hidden = geometry.S - window  # keys 0 .. hidden - 1 are out of the last query's reach
    for tensor in (k, v, k_noise):
        if tensor is not None and hidden > 0:
            tensor[:, :hidden] -= 2.0
    after = diff_attention(q, k, v, q_noise, k_noise, **options)
    torch.testing.assert_close(after[:, -1], before[:, -1], **CLOSE)


@given(geometries(), impls, st.randoms(use_true_random=False))
def test_keys_and_values_permuted_together_change_nothing(geometry, impl, random):
    q, k, v, q_noise, k_noise = geometry.draw()
    order = list(range(geometry.S))
    random.shuffle(order)
    got = diff_attention(
        q,
        k[:, order],
        v[:, order],
        q_noise,
        None if k_noise is None else k_noise[:, order],
        lam=0.3,
        impl=impl,
    )
    want = diff_attention(q, k, v, q_noise, k_noise, lam=0.3, impl=impl)
    torch.testing.assert_close(got, want, **CLOSE)


@given(geometries(), impls, st.booleans())
def test_grouped_keys_equal_repeated_keys(geometry, impl, causal):
    """Pair first, then repeat: with as many groups as noise heads nothing changes."""
    q, k, v, q_noise, k_noise = geometry.draw()
    times = geometry.N // geometry.G
    options = {"lam": geometry.lam("token"), "causal": causal, "impl": impl}
    got = diff_attention(q, k, v, q_noise, k_noise, **options)
    want = diff_attention(
        q,
        repeated(k, times),
        repeated(v, times),
        q_noise,
        None if k_noise is None else repeated(k_noise, times),
        **options,
    )
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_grouped_keys_are_paired_before_they_are_repeated(impl, groups):
    """The authors' naive file repeats first; only with ungrouped keys is that the same."""
    q, k, v, q_noise, k_noise = Geometry(H=4, N=4, G=groups, D=4).draw()
    times = 4 // groups
    adjacent = torch.stack((k, k_noise), dim=3).flatten(2, 3)  # k0, k0', k1, k1', ...
    wrong_k, wrong_noise = repeated(adjacent, times).unflatten(2, (-1, 2)).unbind(3)
    right = diff_attention(q, k, v, q_noise, k_noise, lam=0.5, impl=impl)
    wrong = diff_attention(q, wrong_k, repeated(v, times), q_noise, wrong_noise, lam=0.5, impl=impl)
    distance = (right - wrong).abs().max().item()
    assert distance < 1e-12 if groups == 4 else distance > 0.05


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("H", "N", "G"), [(4, 4, 2), (6, 6, 3), (8, 4, 2), (6, 3, 1)], ids=str)
def test_head_i_reads_key_group_i_over_group_size(impl, H, N, G):
    geometry = Geometry(H=H, N=N, G=G, E=3)
    q, k, _, q_noise, k_noise = geometry.draw()
    v = torch.arange(G, dtype=torch.float64).view(1, 1, G, 1).expand(1, 5, G, 3)
    out = diff_attention(q, k, v, q_noise, k_noise, lam=0.25, impl=impl)
    want = torch.tensor([h // (H // G) for h in range(H)], dtype=torch.float64) * 0.75
    torch.testing.assert_close(out, want.view(1, 1, H, 1).expand_as(out), **CLOSE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("G", [2, 1])
def test_noise_keys_are_read_by_the_same_group_as_signal_keys(impl, G):
    """Noise head n of a pair reads group n // (N/G): keys sharpen each map to one value."""
    q = torch.full((1, 1, 4, 1), 60.0, dtype=torch.float64)
    k, k_noise = torch.zeros(2, 1, 4, G, 1, dtype=torch.float64).unbind(0)
    for group in range(G):
        k[0, group, group], k_noise[0, 3 - group, group] = 1.0, 1.0
    v = torch.eye(4, dtype=torch.float64).view(1, 4, 1, 4).expand(1, 4, G, 4)
    out = diff_attention(q, k, v, q, k_noise, lam=0.5, impl=impl)[0, 0]
    want = torch.zeros(4, 4, dtype=torch.float64)
    for head in range(4):
        group = head // (4 // G)
        want[head, group] += 1.0
        want[head, 3 - group] -= 0.5
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_four_signals_and_one_noise_with_the_same_map_give_half_of_attention(impl):
    q_noise, k, v = torch.randn(3, 2, 6, 1, 4, dtype=torch.float64).unbind(0)
    q = repeated(q_noise, 4)
    got = diff_attention(q, k, v, q_noise, k.clone(), lam=0.5, impl=impl)
    torch.testing.assert_close(got, 0.5 * softmax_attention(q, k, v, impl="reference"), **CLOSE)


@given(geometries(), impls)
def test_shared_noise_heads_equal_repeated_noise_heads(geometry, impl):
    q, k, v, q_noise, k_noise = geometry.draw()
    lam = geometry.lam("head")
    got = diff_attention(q, k, v, q_noise, k_noise, lam=lam, impl=impl)
    spread = repeated(q_noise, geometry.H // geometry.N)
    want = diff_attention(q, k, v, spread, k_noise, lam=lam, impl=impl)
    torch.testing.assert_close(got, want, **CLOSE)


@given(geometries(), impls)
def test_scale_is_applied_once(geometry, impl):
    """Zeros behind every query and key double the width; the explicit scale holds."""
    q, k, v, q_noise, k_noise = geometry.draw()
    want = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, causal=True, impl=impl)
    wide = [
        None if t is None else torch.cat((t, torch.zeros_like(t)), dim=-1)
        for t in (q, k, q_noise, k_noise)
    ]
    got = diff_attention(
        wide[0],
        wide[1],
        v,
        wide[2],
        wide[3],
        lam=0.4,
        causal=True,
        scale=geometry.D**-0.5,
        impl=impl,
    )
    torch.testing.assert_close(got, want, **CLOSE)


@given(geometries(), impls)
def test_every_shape_of_lam_means_the_same_number(geometry, impl):
    q, k, v, q_noise, k_noise = geometry.draw()
    want = diff_attention(q, k, v, q_noise, k_noise, lam=0.375, impl=impl)
    for shape in ((), (geometry.H,), (geometry.B, geometry.T, geometry.H)):
        lam = torch.full(shape, 0.375)  # fp32, exact
        got = diff_attention(q, k, v, q_noise, k_noise, lam=lam, impl=impl)
        torch.testing.assert_close(got, want, **CLOSE)


@given(geometries(square=True))
def test_full_window_and_causal_mask_change_nothing(geometry):
    """The same visibility said in three ways."""
    q, k, v, q_noise, k_noise = geometry.draw()
    want = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, causal=True, impl="reference")
    triangle = torch.ones(geometry.T, geometry.T, dtype=torch.bool).tril()
    for impl in IMPLEMENTATIONS:
        for options in ({"causal": True, "window": geometry.T}, {"mask": triangle}):
            got = diff_attention(q, k, v, q_noise, k_noise, lam=0.4, impl=impl, **options)
            torch.testing.assert_close(got, want, **CLOSE)
