"""Batches within a limit: their size from one row's peak, and halving where that was too much."""

import pytest
import torch

from diffattn.errors import UserError
from diffattn.evaluation import batches
from diffattn.evaluation.batches import in_batches, rows_within

MB = 2**20


class Rows(torch.nn.Module):
    """4 MB of weights; a batch of n rows takes 16 n MB."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(MB))
        self.asked = []

    def run(self, count):
        self.asked.append(count)
        torch.ones(count * 4 * MB)


@pytest.mark.parametrize(
    ("memory", "most", "rows"),
    [(22 * MB, 64, 1), (60 * MB, 64, 2), (90 * MB, 64, 4), (10**12, 64, 64), (10**12, 5, 4)],
)
def test_a_limit_gives_rows(memory, most, rows):
    model = Rows()
    assert rows_within(model, model.run, memory=memory, most=most) == rows
    assert set(model.asked) == {1}  # nothing larger is tried


def test_a_limit_below_one_row_is_refused():
    model = Rows()
    with pytest.raises(UserError, match=r"memory: expected at least 2\d\.\d MiB.*got 15\.0 MiB"):
        rows_within(model, model.run, memory=15 * MB)


def test_without_a_limit_the_free_memory_is_one(monkeypatch):
    model = Rows()
    monkeypatch.setattr(batches, "free_memory", lambda device: 200 * MB)
    assert rows_within(model, model.run) == 8  # 0.7 x 200 / 16


def test_one_row_is_not_measured():
    model = Rows()
    assert rows_within(model, model.run, most=1) == 1
    assert not model.asked


def test_a_system_that_tells_nothing_gets_one_row(monkeypatch):
    def silent(run, device):
        raise OSError("no /proc")

    monkeypatch.setattr(batches, "peak_of", silent)
    assert rows_within(Rows(), lambda count: None, memory=10**12) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"),
        MemoryError(),
    ],
)
def test_a_batch_that_does_not_fit_is_halved(error):
    sizes = []

    def run(items):
        sizes.append(len(items))
        if len(items) > 3:
            raise error
        return [item * 10 for item in items]

    assert list(in_batches(range(7), 8, run)) == [0, 10, 20, 30, 40, 50, 60]
    assert sizes == [7, 4, 2, 2, 2, 1]  # and does not grow again


def test_other_errors_and_single_items_are_not_tried_again():
    def broken(items):
        raise RuntimeError("shapes differ")

    def full(items):
        raise torch.OutOfMemoryError

    with pytest.raises(RuntimeError, match="shapes differ"):
        list(in_batches(range(4), 4, broken))
    with pytest.raises(torch.OutOfMemoryError):
        list(in_batches(range(4), 4, full))
