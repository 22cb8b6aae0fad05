"""The metrics file: one JSON line for every logged step, exact through a resume."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a half-written last line is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or "step" not in record:
            break
        records.append(record)
    return records


class MetricsLog(TrainerCallback):
    """Writes step, tokens, seconds of training, loss, gradient norm, held-out loss, warnings.

    Seconds count the optimizer steps alone, not measurements, checkpoints or pauses, and go on
    counting after a resume.

    Args:
        path: of the file.
        tokens_per_step: input tokens of one optimizer step.
        measure: gives the held-out loss of the model in nats per token.
        measure_every: steps between two measurements; the last step is always measured.
        warnings: list that a monitor, called before this, appends to.
    """

    def __init__(
        self,
        path: Path,
        *,
        tokens_per_step: int,
        measure: Callable[[nn.Module], float] | None = None,
        measure_every: int | None = None,
        warnings: list[str] | None = None,
    ) -> None:
        self.warnings = [] if warnings is None else warnings
        self._warned = 0
        self.path, self.tokens_per_step = path, tokens_per_step
        self.measure, self.measure_every = measure, measure_every
        self.seconds = 0.0
        self._started = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop what was logged after the checkpoint that training resumes from."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
        self.seconds = kept[-1]["seconds"] if kept else 0.0
        if not state.is_world_process_zero:
            return
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(draft, self.path)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._started

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Append a line; measure the held-out loss where it is due."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        step = state.global_step
        record = {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "seconds": round(self.seconds, 4),
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
        }
        due = self.measure_every and (step % self.measure_every == 0 or step == state.max_steps)
        if due and self.measure is not None and model is not None:
            record["heldout_loss"] = self.measure(model)
        if len(self.warnings) > self._warned:
            record["warnings"] = self.warnings[self._warned :]
            self._warned = len(self.warnings)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
