"""Packed text in training order, with the documents kept apart."""

from __future__ import annotations

import numpy as np

from diffattn.data.packing import IntArray, Windows
from diffattn.errors import UserError


class TextStream:
    """Windows of packed documents by index, for a sampler that goes through them in order.

    Each item has `input_ids`, `labels` and `position_ids`, all [1, length]: positions start anew
    with each document, so models of transformers keep documents apart, and the first token of a
    document is no label (-100), as nothing before it tells of it.
    """

    def __init__(self, windows: Windows, *, rows_per_step: int, steps: int) -> None:
        """Set up the stream.

        Args:
            windows: of training text, with a seed of their order.
            rows_per_step: windows of one optimizer step over all processes.
            steps: optimizer steps.

        Raises:
            UserError: counts are below 1.
        """
        for name, value in (("rows_per_step", rows_per_step), ("steps", steps)):
            if value < 1:
                raise UserError(f"{name}: expected at least 1, got {value}")
        self._windows, self._count = windows, rows_per_step * steps
        self._starts = np.unique(windows.tokens.offsets[:-1])

    def __len__(self) -> int:
        """Return the number of items in all steps."""
        return self._count

    def __getitem__(self, index: int) -> dict[str, IntArray]:
        """Return item `index`.

        Raises:
            IndexError: `index` is out of range.
        """
        if not 0 <= index < self._count:
            raise IndexError(f"item {index} of {self._count}")
        ids, start = self._windows.located(index)
        places = np.arange(start, start + len(ids))
        document = np.searchsorted(self._starts, places, side="right") - 1
        begins = np.maximum(self._starts[document], start)
        positions, labels = places - begins, ids.copy()
        labels[positions == 0] = -100
        return {
            "input_ids": ids[None],
            "labels": labels[None],
            "position_ids": positions[None].astype(np.int64),
        }

    def kind(self, step: int) -> str:
        """Name what a step trains: losses compare within a kind."""
        return "text"
