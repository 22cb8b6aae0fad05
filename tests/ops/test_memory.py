"""Memory of the implementations that promise to grow linearly with length."""

import pytest
import torch
from operands import Geometry
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffattn.ops import diff_attention


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest storage that any operation puts out."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                held = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.elements = max(self.elements, held)
        return result


def largest(impl, T, S, *, backward, **options):
    tensors = Geometry(T=T, S=S, D=8, E=16).draw(torch.float32, requires_grad=backward)
    with LargestTensor() as seen:
        out = diff_attention(*tensors, lam=0.4, impl=impl, **options)
        if backward:
            out.sum().backward()
    return seen.elements


CASES = {
    "square-causal": (1024, 1024, {"causal": True}),
    "longer-keys-causal": (1024, 1280, {"causal": True}),
    "longer-queries-causal": (1280, 1024, {"causal": True}),
    "square-window": (1024, 1024, {"causal": True, "window": 64}),
    "window-both-ways": (1024, 1280, {"window": 64}),
}


@pytest.fixture(autouse=True)
def _nan_filled_memory():
    """Plain memory here: filling it would cost the time of the kernels."""


@pytest.mark.parametrize("impl", ["sdpa", "one_call"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", list(CASES))
def test_largest_tensor_grows_linearly(impl, backward, case):
    """Four times the length, at most four times the largest tensor, and never a map."""
    T, S, options = CASES[case]
    factor = 2 if backward else 4
    short = largest(impl, T, S, backward=backward, **options)
    long = largest(impl, factor * T, factor * S, backward=backward, **options)
    assert long <= 1.1 * factor * short
    assert long < factor * T * factor * S / 2  # one map of one head would be twice that


def test_reference_is_seen_to_grow_quadratically():
    """The measurement itself: the eager definition holds its maps."""
    short = largest("reference", 256, 256, backward=False, causal=True)
    assert largest("reference", 512, 512, backward=False, causal=True) >= 3.5 * short
