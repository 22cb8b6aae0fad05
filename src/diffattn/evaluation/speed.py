"""Training speed of several models, measured in turn so that machine noise meets all alike."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def training_rates(
    models: Sequence[Any],
    input_ids: Tensor,
    *,
    rounds: int,
    learning_rate: float = 1e-4,
) -> np.ndarray:
    """Tokens per second of a full training step (forward, backward, AdamW).

    Each round runs every model once, starting with another one each time; one round before is
    not counted.

    Args:
        models: causal language models that return their loss; their weights change.
        input_ids: [B, T] tokens of the step.
        rounds: counted rounds.
        learning_rate: of AdamW.

    Returns:
        [models, rounds] tokens per second.
    """
    optimizers = [torch.optim.AdamW(model.parameters(), lr=learning_rate) for model in models]
    rates = np.zeros((len(models), rounds))
    for number in range(-1, rounds):
        for place in range(len(models)):
            index = (place + number) % len(models)
            started = time.perf_counter()
            _step(models[index], optimizers[index], input_ids)
            if number >= 0:
                rates[index, number] = input_ids.numel() / (time.perf_counter() - started)
    return rates


def _step(model: Any, optimizer: torch.optim.Optimizer, input_ids: Tensor) -> None:
    model.train()
    ids = input_ids.to(model.device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
