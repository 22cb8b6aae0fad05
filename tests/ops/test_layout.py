"""Orders of heads and rows: there and back, and what each order leaves unchanged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operands import Geometry, geometries

from diffattn.ops import (
    apply_rotary,
    diff_attention,
    join_stripes,
    rotary_angles,
    split_stripes,
    stack_keys,
    stack_queries,
)
from diffattn.ops.layout import (
    adjacent_to_half_split,
    half_split_to_adjacent,
    half_to_interleaved,
    interleaved_to_half,
)

FORWARD_AND_BACK = [
    (half_split_to_adjacent, adjacent_to_half_split),
    (adjacent_to_half_split, half_split_to_adjacent),
    (interleaved_to_half, half_to_interleaved),
    (half_to_interleaved, interleaved_to_half),
]


@pytest.mark.parametrize(
    ("there", "back"), FORWARD_AND_BACK, ids=[f.__name__ for f, _ in FORWARD_AND_BACK]
)
@given(pairs=st.integers(1, 5), half=st.integers(1, 4), columns=st.integers(0, 3))
def test_row_orders_round_trip_bitwise(there, back, pairs, half, columns):
    shape = (2 * pairs * 2 * half, columns) if columns else (2 * pairs * 2 * half,)
    rows = torch.randn(shape)
    moved = there(rows, 2 * half)
    assert moved.shape == rows.shape
    assert torch.equal(back(moved, 2 * half), rows)


@given(geometries())
def test_stripes_round_trip_bitwise(geometry):
    signal, _, _, noise, _ = geometry.draw(torch.float32)
    heads = join_stripes(signal, noise)
    assert heads.shape[2] == geometry.H + geometry.N
    back = split_stripes(heads, geometry.H // geometry.N)
    assert torch.equal(back[0], signal)
    assert torch.equal(back[1], noise)


def test_a_stripe_is_its_signal_heads_and_then_its_noise_head():
    signal = torch.arange(6.0).view(1, 1, 6, 1)
    noise = torch.tensor([10.0, 11.0]).view(1, 1, 2, 1)
    assert join_stripes(signal, noise).flatten().tolist() == [0, 1, 2, 10, 3, 4, 5, 11]


def test_ratio_one_is_the_adjacent_pair():
    signal, noise = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])
    heads = join_stripes(signal.view(1, 1, 2, 1), noise.view(1, 1, 2, 1))
    assert heads.flatten().tolist() == [0, 1, 2, 3]


def test_half_split_pairs_head_i_with_head_i_plus_half():
    rows = torch.tensor([0.0, 1.0, 2.0, 10.0, 11.0, 12.0])
    assert half_split_to_adjacent(rows, 1).tolist() == [0, 10, 1, 11, 2, 12]


def test_half_split_rows_give_the_same_attention():
    """A projection whose pairs stand half a model apart, converted, is the same operator."""
    weight, x = torch.randn(6 * 4, 10, dtype=torch.float64), torch.randn(2, 5, 10).double()
    _, k, v, _, k_noise = Geometry(B=2, H=3, N=3, G=3).draw()
    half_split = (x @ weight.T).unflatten(-1, (6, 4))
    want = diff_attention(half_split[:, :, :3], k, v, half_split[:, :, 3:], k_noise, lam=0.4)
    adjacent = (x @ half_split_to_adjacent(weight, 4).T).unflatten(-1, (6, 4))
    signal, noise = split_stripes(adjacent, 1)
    got = diff_attention(signal, k, v, noise, k_noise, lam=0.4)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@given(half=st.integers(1, 4), heads=st.integers(1, 3), start=st.integers(0, 50), length=st.just(5))
def test_both_rotary_styles_give_the_same_scores_after_conversion(half, heads, start, length):
    width = 2 * half
    x = torch.randn(1, length, 7, dtype=torch.float64)
    wq, wk = torch.randn(2, heads * width, 7, dtype=torch.float64).unbind(0)
    cos, sin = (t.double() for t in rotary_angles(torch.arange(start, start + length), width))

    def scores(wq, wk, style):
        q, k = (
            apply_rotary((x @ w.T).unflatten(-1, (heads, width)), cos, sin, style=style)
            for w in (wq, wk)
        )
        return torch.einsum("bthd,bshd->bhts", q, k)

    want = scores(wq, wk, "interleaved")
    converted = (interleaved_to_half(w, width) for w in (wq, wk))
    torch.testing.assert_close(scores(*converted, "half"), want, rtol=0, atol=1e-12)
    back = (half_to_interleaved(interleaved_to_half(w, width), width) for w in (wq, wk))
    assert torch.equal(scores(*back, "interleaved"), want)


def test_stacked_queries_and_keys_give_the_scores_of_both_maps():
    geometry = Geometry(H=4, N=2, G=2)
    q, k, _, q_noise, k_noise = geometry.draw()
    queries = stack_queries(q, q_noise, own_noise_key=True)
    keys = stack_keys(k, k_noise)
    assert queries.shape == (1, 5, 6, 8)
    assert keys.shape == (1, 5, 2, 8)
    spread = keys.repeat_interleave(3, dim=2)  # a stock kernel's sharing of grouped keys
    signal, noise = split_stripes(torch.einsum("bthd,bshd->bths", queries, spread), 2)
    want = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(2, dim=2))
    torch.testing.assert_close(signal, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        noise, torch.einsum("bthd,bshd->bths", q_noise, k_noise), rtol=0, atol=1e-14
    )


def test_stacking_without_own_noise_keys_keeps_the_width():
    q, k, _, q_noise, _ = Geometry(H=4, N=2, G=2).draw()
    assert torch.equal(stack_queries(q, q_noise, own_noise_key=False), join_stripes(q, q_noise))
    assert stack_keys(k, None) is k
