"""Times taken in turns, so that machine noise meets all sides alike."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def take_turns(
    sides: Sequence[Callable[[], object]],
    *,
    rounds: int,
    seconds: float = 0.0,
    shortest: float = 0.0,
) -> np.ndarray:
    """Seconds of every side in every round.

    Each round runs every side once, starting with another one each time; one round before is
    not counted.

    Args:
        sides: functions that return when their work is done.
        rounds: counted rounds, at the least.
        seconds: counted rounds go on for so long.
        shortest: seconds; a side that is done earlier runs again within its turn.

    Returns:
        [sides, rounds] seconds of one run.
    """
    columns: list[np.ndarray] = []
    number, end = -1, time.monotonic() + seconds
    while number < rounds or time.monotonic() < end:
        column = np.zeros(len(sides))
        for place in range(len(sides)):
            index = (place + number) % len(sides)
            column[index] = _timed(sides[index], shortest)
        if number < 0:
            end = time.monotonic() + seconds
        else:
            columns.append(column)
        number += 1
    return np.stack(columns, axis=1)


def _timed(side: Callable[[], object], shortest: float) -> float:
    started, runs = time.perf_counter(), 0
    while True:
        side()
        runs += 1
        taken = time.perf_counter() - started
        if taken >= shortest:
            return taken / runs


def training_rates(
    models: Sequence[Any],
    input_ids: Tensor,
    *,
    rounds: int,
    seconds: float = 0.0,
    learning_rate: float = 1e-4,
) -> np.ndarray:
    """Tokens per second of a full training step (forward, backward, AdamW), models in turns.

    Args:
        models: causal language models that return their loss; their weights change.
        input_ids: [B, T] tokens of the step.
        rounds: as in `take_turns`.
        seconds: as there.
        learning_rate: of AdamW.

    Returns:
        [models, rounds] tokens per second.
    """
    sides = [_training_step(model, input_ids, learning_rate) for model in models]
    return input_ids.numel() / take_turns(sides, rounds=rounds, seconds=seconds)


def _training_step(model: Any, input_ids: Tensor, learning_rate: float) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    ids = input_ids.to(model.device)
    model.train()

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return step
