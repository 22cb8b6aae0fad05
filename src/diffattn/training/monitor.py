"""Watches loss and gradient norm for spikes, and for numbers that are none."""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diffattn.errors import UserError


class DivergedError(UserError):
    """Training cannot go on: the loss or the gradient is not a finite number."""


class SpikeMonitor(TrainerCallback):
    """Reports a loss or gradient norm far above its recent median; stops at NaN.

    A value is a spike when it exceeds the median of the last `memory` values of its kind by
    `factor` times their median absolute deviation, and by 0.1 nats (loss) or to more than twice
    the median and the norm that is clipped to (gradient). The first `patience` values of a kind
    only fill the memory.

    Args:
        kind_of: names what a step, counted from 0, trains, where one loss does not compare with
            another; None means that all do.
        factor: median absolute deviations above the median.
        memory: number of recent values.
        patience: values to see before judging.

    Attributes:
        warnings: one line for each spike, at most `limit`.

    Raises:
        DivergedError: a loss or gradient norm is NaN or infinite.
    """

    limit = 20

    def __init__(
        self,
        *,
        kind_of: Callable[[int], str] | None = None,
        factor: float = 12.0,
        memory: int = 50,
        patience: int = 20,
    ) -> None:
        self.kind_of, self.factor, self.patience = kind_of, factor, patience
        self.warnings: list[str] = []
        self._recent: dict[tuple[str, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=memory)
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Judge the newest values."""
        kind = "" if self.kind_of is None else self.kind_of(state.global_step - 1)
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is None:
                continue
            if not math.isfinite(value):
                raise DivergedError(
                    f"{name} is {value} at step {state.global_step}; expected a finite number "
                    f"(learning_rate {args.learning_rate:g})"
                )
            recent = self._recent[name, kind]
            if len(recent) >= self.patience and len(self.warnings) < self.limit:
                centre = median(recent)
                spread = median(abs(x - centre) for x in recent)
                # a gradient that is not even clipped, or a loss near 0 that doubles, harms nothing
                floor = centre + 0.1 if name == "loss" else max(2 * centre, args.max_grad_norm)
                if value > max(centre + self.factor * spread, floor):
                    self.warnings.append(
                        f"{name} spike at step {state.global_step}: {value:.3g}, median of the "
                        f"last {len(recent)} is {centre:.3g}"
                    )
            recent.append(value)
