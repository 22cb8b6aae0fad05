"""The training stream: optimizer steps of text interleaved with steps of recall."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from diffattn.data.packing import IntArray, Windows
from diffattn.data.recall import RecallStream
from diffattn.errors import UserError

RecallStage = tuple[int, RecallStream]


class TrainingStream:
    """Training sequences by index, for a sampler that goes through them in order.

    Index i belongs to optimizer step i // rows_per_step, which is text or recall as a whole.
    After any k steps, floor(recall_share * k) of them were recall. Every item holds as many tokens
    as a window of text: one window, or as many recall sequences as fill it. Each kind is consumed
    in order without gaps. An item depends on its index alone, so the stream is the same on any
    number of processes, also after a resume.
    """

    def __init__(
        self,
        text_windows: Windows,
        recall: Sequence[RecallStage] = (),
        *,
        recall_share: float,
        rows_per_step: int,
        steps: int,
    ) -> None:
        """Set up the stream.

        Args:
            text_windows: sequences of text, where each token is a label.
            recall: stages of the recall steps, as (number of steps, sequences); the last stage
                goes on without end. Short sequences first make a curriculum.
            recall_share: share of the steps that are recall, from 0 to 1.
            rows_per_step: items of one optimizer step over all processes.
            steps: optimizer steps.

        Raises:
            UserError: a share outside [0, 1], a share above 0 without `recall`, counts below 1,
                a recall length that does not divide the window's, or more text asked for than
                windows without a seed have.
        """
        if not 0 <= recall_share <= 1:
            raise UserError(f"recall_share: expected 0 to 1, got {recall_share}")
        if recall_share > 0 and not recall:
            raise UserError(f"recall: expected a recall stream for a share of {recall_share}")
        if rows_per_step < 1:
            raise UserError(f"rows_per_step: expected at least 1, got {rows_per_step}")
        if steps < 1:
            raise UserError(f"steps: expected at least 1, got {steps}")
        for _, stream in recall:
            if text_windows.length % stream.spec.length:
                raise UserError(
                    f"recall: sequences of {stream.spec.length} tokens do not fill a window of "
                    f"{text_windows.length}"
                )
        # Exact arithmetic: in floats, 100 steps of a share of 0.29 would be 28 recall steps.
        self._share = Fraction(recall_share).limit_denominator(1_000_000)
        self._text = text_windows
        self._recall = tuple(recall)
        self._rows_per_step = rows_per_step
        self._steps = steps
        needed = (steps - self._recall_steps(steps)) * rows_per_step
        if text_windows.seed is None and needed > len(text_windows):
            raise UserError(
                f"steps: {steps} steps need {needed:,} text windows, but windows without a seed "
                f"end after {len(text_windows):,}"
            )

    def __len__(self) -> int:
        """Return the number of items in all steps."""
        return self._steps * self._rows_per_step

    def __getitem__(self, index: int) -> dict[str, IntArray]:
        """Return item `index`.

        Args:
            index: 0 or more, below `len(self)`.

        Returns:
            `input_ids` with `labels`, both [sequences, length]; labels are not shifted, and -100
            where nothing is to be learned.

        Raises:
            IndexError: `index` is out of range.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        step, row = divmod(index, self._rows_per_step)
        recall_steps = self._recall_steps(step)
        if self._recall_steps(step + 1) == recall_steps:
            window = self._text[(step - recall_steps) * self._rows_per_step + row]
            return {"input_ids": window[None], "labels": window[None].copy()}
        stream, step_of_stage = self._stage(recall_steps)
        sequences = self._text.length // stream.spec.length
        first = (step_of_stage * self._rows_per_step + row) * sequences
        asked = [stream[first + place] for place in range(sequences)]
        return {
            "input_ids": np.stack([sequence.input_ids for sequence in asked]),
            "labels": np.stack([sequence.labels for sequence in asked]),
        }

    def kind(self, step: int) -> str:
        """Name what optimizer step `step`, counted from 0, trains: losses compare within a kind."""
        recall_steps = self._recall_steps(step)
        if self._recall_steps(step + 1) == recall_steps:
            return "text"
        return f"recall of {self._stage(recall_steps)[0].spec.length} tokens"

    def _recall_steps(self, steps: int) -> int:
        """Return how many of the first steps are recall."""
        return steps * self._share.numerator // self._share.denominator

    def _stage(self, recall_step: int) -> tuple[RecallStream, int]:
        """Return the sequences of a recall step, with its number within their stage."""
        for steps, stream in self._recall[:-1]:
            if recall_step < steps:
                return stream, recall_step
            recall_step -= steps
        return self._recall[-1][1], recall_step
