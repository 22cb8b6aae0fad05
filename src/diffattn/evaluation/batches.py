"""Batches as large as a limit of memory allows."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from diffattn.errors import UserError
from diffattn.memory import free_memory, peak_of
from diffattn.report.numbers import bytes_text

Item = TypeVar("Item")
Result = TypeVar("Result")
_PART = 0.7  # of what is free, where no limit is named: lengths differ, others need some too


def rows_within(
    model: Any, run: Callable[[int], Any], *, memory: int | None = None, most: int = 64
) -> int:
    """Rows of a batch that a limit of memory allows, by the peak of one row.

        rows = (limit - weights) / peak of one row

    as a power of two, so that noise of the measurement seldom changes it.

    Args:
        model: whose weights count; tells the device.
        run: computes a batch of so many rows of the longest item.
        memory: bytes that the weights and a batch may take; None takes most of what is free.
        most: rows at most.

    Returns:
        At least 1; exactly 1 where `most` is 1, unmeasured without a limit, or where the system
        does not tell what memory is taken.

    Raises:
        UserError: the limit is below the weights and one row.
    """
    if most == 1 and memory is None:
        return 1
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    try:
        run(1)  # what only the first call takes
        peak = max(peak_of(lambda: run(1), model.device), 1)
        room = int(_PART * free_memory(model.device)) if memory is None else memory - held
    except OSError:
        return 1
    if memory is not None and room < peak:
        raise UserError(
            f"memory: expected at least {bytes_text(held + peak)}, which the weights and one row "
            f"take, got {bytes_text(memory)}"
        )
    rows = max(min(room // peak, most), 1)
    return 1 << (rows.bit_length() - 1)


def in_batches(
    items: Sequence[Item], rows: int, run: Callable[[Sequence[Item]], Sequence[Result]]
) -> Iterator[Result]:
    """Results of all items in order; a batch that does not fit is halved, and so are later ones.

    Args:
        items: in the order of the results.
        rows: of a batch.
        run: gives a result for each of some items.

    Raises:
        torch.OutOfMemoryError: one item alone does not fit.
    """
    start = 0
    while start < len(items):
        try:
            found = run(items[start : start + rows])
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if rows == 1 or not _is_memory(error):
                raise
            found = None
        if found is None:  # behind the handler, which holds what the failed batch had
            rows //= 2
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            continue
        yield from found
        start += len(found)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the CPU's allocator has no class of its own
    return "not enough memory" in str(error) or "can't allocate memory" in str(error)
