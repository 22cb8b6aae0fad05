"""lam's schedule, driven by the Trainer."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diffattn.dex.adapter import set_step


class DexCallback(TrainerCallback):
    """Keeps lam(t) at the Trainer's step, also after a resume.

    The forward pass of optimizer step n, counted from 0, sees t = n.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start where the Trainer starts."""
        set_step(kwargs["model"], state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move on."""
        set_step(kwargs["model"], state.global_step)
