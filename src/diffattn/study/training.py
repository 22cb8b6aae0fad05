"""Training as every adaptation is trained: AdamW with warm-up, a cosine to zero, no decay."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diffattn.data import TextStream
from diffattn.training import DiffTrainer, TrainConfig, train

_LINE_EVERY_SECONDS = 10.0


def train_adaptation(
    model: Any,
    stream: TextStream,
    folder: Path,
    *,
    rows: int,
    learning_rate: float,
    seed: int,
    bf16: bool,
    keep: bool,
    trainer: Callable[..., DiffTrainer],
    callbacks: Sequence[Any],
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> float:
    """Train over a stream, going on from the newest checkpoint in the folder.

    Args:
        model: with the parameters to train requiring gradients.
        stream: windows of all steps.
        folder: of metrics and checkpoints.
        rows: windows of one optimizer step.
        learning_rate: peak, after 3 % warm-up.
        seed: of the Trainer.
        bf16: compute under bf16 autocast.
        keep: whether to write checkpoints on the way.
        trainer: makes the Trainer.
        callbacks: of the Trainer.
        say: gets a line every so often.
        should_stop: asked after each step.

    Returns:
        Seconds of the steps.

    Raises:
        Interrupted: `should_stop` asked for it; a checkpoint was saved.
        DivergedError: loss or gradient norm is not finite.
    """
    steps, length = len(stream) // rows, stream[0]["input_ids"].size
    config = TrainConfig(
        steps=steps,
        rows_per_step=rows,
        rows_per_device=1,
        learning_rate=learning_rate,
        warmup_share=0.03,
        final_lr_share=0.0,
        weight_decay=0.0,
        seed=seed,
        bf16=bf16,
        save_every=max(1, min(50, steps // 4)) if keep else None,
    )
    shown, spent = time.monotonic(), 0.0

    def on_progress(step: int, steps: int, seconds: float) -> None:
        nonlocal shown, spent
        spent = seconds
        if step == steps or time.monotonic() - shown > _LINE_EVERY_SECONDS:
            shown = time.monotonic()
            speed = step * rows * length / max(seconds, 1e-9)
            left = (steps - step) * seconds / max(step, 1)
            say(f"step {step} of {steps}, {speed:,.0f} tokens/s, {left / 60:.1f} min left")

    train(
        model,
        stream,
        config,
        folder,
        on_progress=on_progress,
        should_stop=should_stop,
        trainer_class=trainer,
        callbacks=callbacks,
    )
    return spent
