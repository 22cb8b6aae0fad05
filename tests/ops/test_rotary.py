"""Rotary positions: the rotation itself and the law that scores depend on distance alone."""

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffattn.ops import apply_rotary, rotary_angles

styles = st.sampled_from(["half", "interleaved"])


def rotated(x, positions, style="half"):
    cos, sin = rotary_angles(positions, x.shape[-1])
    return apply_rotary(x, cos, sin, style=style)


def test_half_style_equals_the_loops():
    x = torch.randn(2, 4, 3, 6)
    got = rotated(x, torch.arange(4))
    want = torch.tensor(
        [
            [[oracles.rotate(head, t, 10_000.0) for head in row] for t, row in enumerate(batch)]
            for batch in x.tolist()
        ]
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@given(styles, st.integers(0, 200), st.integers(0, 200), st.integers(0, 300))
def test_scores_depend_on_distance_alone(style, first, second, shift):
    q, k = torch.randn(2, 1, 1, 2, 8).unbind(0)

    def scores(offset):
        one = rotated(q, torch.tensor([first + offset]), style)
        two = rotated(k, torch.tensor([second + offset]), style)
        return (one * two).sum(-1)

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=5e-4)


@given(styles, st.integers(0, 500))
def test_rotation_keeps_the_length_of_a_vector(style, position):
    x = torch.randn(1, 1, 3, 8)
    norms = rotated(x, torch.tensor([position]), style).norm(dim=-1)
    torch.testing.assert_close(norms, x.norm(dim=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_position_zero_changes_nothing(style):
    x = torch.randn(1, 1, 3, 8)
    assert torch.equal(rotated(x, torch.tensor([0]), style), x)


def test_positions_of_each_row_are_its_own():
    x = torch.randn(2, 3, 2, 4)
    positions = torch.tensor([[0, 1, 2], [5, 3, 9]])
    got = rotated(x, positions)
    for row in range(2):
        torch.testing.assert_close(got[row : row + 1], rotated(x[row : row + 1], positions[row]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtype_is_kept_and_angles_are_fp32(dtype):
    x = torch.randn(1, 3, 2, 4).to(dtype)
    cos, sin = rotary_angles(torch.arange(3), 4)
    assert cos.dtype == sin.dtype == torch.float32
    assert apply_rotary(x, cos, sin).dtype == dtype


def test_frequencies_are_the_papers():
    cos, sin = rotary_angles(torch.tensor([1, 3]), 4, theta=100.0)
    angles = torch.tensor([[1.0, 0.1], [3.0, 0.3]])
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=1e-6)
