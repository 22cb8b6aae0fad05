"""Recall of needles: what the model answers to each question."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffattn.data import RecallItem


@dataclass(frozen=True, slots=True)
class RecallOutcome:
    """Answers to the questions of one recall sequence."""

    accuracy: float
    """Share of the questions whose most likely token is the answer."""
    swap: float
    """Share of the questions answered with another needle of the sequence."""


@torch.no_grad()
def recall_outcomes(
    model: Any, items: Sequence[RecallItem], *, tokens_per_batch: int
) -> list[RecallOutcome]:
    """Ask every question of every item, earlier answers given.

    The prediction is the most likely token of the whole vocabulary at the question's position.
    The best content-free strategy, to name one of the asked class's values, scores 1/values.

    Args:
        model: a causal language model of Hugging Face's interface, on its device.
        items: sequences of the evaluation grid.
        tokens_per_batch: tokens that go through the model at a time, at least one sequence.

    Returns:
        One outcome for each item, in order.
    """
    was_training = model.training
    model.eval()
    outcomes: list[RecallOutcome] = []
    for batch in batches_of_one_length(items, tokens_per_batch):
        ids = torch.as_tensor(np.stack([item.sequence.input_ids for item in batch]))
        # only the questions' positions need logits: all of them follow the first question
        first = min(int(item.sequence.query_positions[0]) for item in batch)
        kept = torch.arange(first, ids.shape[1], device=model.device)
        logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits
        predictions = logits.argmax(dim=-1).cpu().numpy()
        for item, predicted in zip(batch, predictions, strict=True):
            sequence = item.sequence
            answers = predicted[sequence.query_positions - first]
            right = answers == sequence.answers
            needles = sequence.input_ids[sequence.needle_positions]
            swapped = np.isin(answers, needles) & ~right
            outcomes.append(RecallOutcome(float(right.mean()), float(swapped.mean())))
    model.train(was_training)
    return outcomes


def batches_of_one_length(
    items: Sequence[RecallItem], tokens_per_batch: int
) -> Iterator[list[RecallItem]]:
    """Neighbouring items of equal length, as many as the tokens allow."""
    batch: list[RecallItem] = []
    for item in items:
        full = bool(batch) and (len(batch) + 1) * item.length > tokens_per_batch
        if batch and (full or batch[0].length != item.length):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
