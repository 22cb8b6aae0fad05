"""What hides a key in a float mask, and that hidden keys may hold anything."""

import math

import pytest
import torch
from operands import Geometry

from diffattn.ops import IMPLEMENTATIONS, diff_attention
from diffattn.ops.masks import hidden_entries

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("made_in", DTYPES, ids=str)
def test_a_lowest_number_hides_in_every_dtype(made_in, dtype):
    """A mask made in one dtype and cast to another; what overflows there is -inf."""
    mask = torch.tensor([torch.finfo(made_in).min, -math.inf, 0.0], dtype=made_in).to(dtype)
    assert hidden_entries(mask).tolist() == [True, True, False]


@pytest.mark.parametrize("value", [-65503.0, -65505.0, -7e4, -1e30, math.nan, math.inf, 65504.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_other_number_is_added(dtype, value):
    assert not hidden_entries(torch.tensor([value], dtype=dtype)).any()


@pytest.mark.parametrize("made_in", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_row_that_sees_nothing_gives_zeros_whatever_the_mask_was_made_in(impl, made_in):
    tensors = Geometry(B=2, T=3, S=5).draw(torch.float32, requires_grad=True)
    visible = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    visible[:, :, 0] = False
    visible[:, :, 1, 2] = False
    mask = torch.zeros(visible.shape, dtype=made_in).masked_fill(~visible, torch.finfo(made_in).min)
    out = diff_attention(*tensors, lam=0.4, mask=mask.float(), impl=impl)
    out.sum().backward()
    assert (out[:, 0] == 0).all()
    assert all(t.grad.isfinite().all() for t in tensors)
    torch.testing.assert_close(out, diff_attention(*tensors, lam=0.4, mask=visible, impl=impl))


def _by_mask(geometry):
    """Rows of keys hidden from every query by masks of all shapes that broadcast."""
    sizes = (geometry.B, geometry.H, geometry.T, geometry.S)
    for axes in ([3], [2, 3], [1, 2, 3], [0, 3], [0, 1, 2, 3]):
        shape = [size if axis in axes else 1 for axis, size in enumerate(sizes)]
        mask = torch.ones(shape, dtype=torch.bool)
        mask[..., 3] = False
        yield {"mask": mask}, (slice(None), 3)
    whole_row = torch.tensor([True, False])[:, None, None, None]
    yield {"mask": whole_row}, (1, slice(None))


GEOMETRY = Geometry(B=2, T=3, S=5, H=2, N=2, G=2)
UNSEEN = [
    *_by_mask(GEOMETRY),
    ({"causal": True, "window": 2}, (slice(None), 0)),
    ({"window": 1}, (slice(None), 1)),
    # the mask shows the last key to queries that stand before it alone
    (
        {"causal": True, "mask": torch.tensor([[1, 1, 1, 1, 1]] * 2 + [[1, 1, 1, 1, 0]]).bool()},
        (slice(None), 4),
    ),
    # the mask shows the first key to queries whose window has left it behind
    (
        {
            "window": 3,
            "causal": True,
            "mask": torch.tensor([[0, 1, 1, 1, 1]] + [[1] * 5] * 2).bool(),
        },
        (slice(None), 0),
    ),
]


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("case", range(len(UNSEEN)))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_keys_that_no_query_sees_may_hold_anything(impl, case, garbage):
    options, where = UNSEEN[case]
    clean = GEOMETRY.draw(torch.float64)
    dirty = [t.clone() for t in clean]
    for index in (1, 2, 4):
        dirty[index][where] = garbage
        dirty[index].requires_grad_()
    out = diff_attention(*dirty, lam=0.4, **options, impl=impl)
    want = diff_attention(*clean, lam=0.4, **options, impl="reference")
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    out.sum().backward()
    assert all(dirty[index].grad.isfinite().all() for index in (1, 2, 4))
