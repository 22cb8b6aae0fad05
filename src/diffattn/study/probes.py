"""What every model of a study is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffattn.analysis import head_redundancy
from diffattn.data import (
    AnswerItem,
    TextStream,
    TokenFile,
    Windows,
    corpus_digest,
    load_documents,
    load_tokenizer,
    many_shot_items,
    needle_items,
    query_documents,
    split_documents,
)
from diffattn.errors import UserError
from diffattn.evaluation import answer_outcomes, item_losses
from diffattn.study.settings import StudySettings
from diffattn.study.text import Text, encode_documents

_MAP_TOKENS = 512
_MAP_SEQUENCES = 2

Item = dict[str, np.ndarray]


@dataclass(frozen=True)
class Measure:
    """A measure of a study: one number for each item.

    Args:
        name: in results.
        title: in reports.
        unit: of the numbers.
        better: "lower" or "higher".
    """

    name: str
    title: str
    unit: str
    better: str


MEASURES = (
    Measure("heldout_loss", "held-out loss", "nats per token", "lower"),
    Measure("outside_loss", "loss on other text", "nats per token", "lower"),
    Measure("needle_loss", "needles: loss", "nats per number", "lower"),
    Measure("needle_accuracy", "needles: right", "share", "higher"),
    Measure("many_shot_loss", "many-shot: loss", "nats per label", "lower"),
    Measure("many_shot_accuracy", "many-shot: right", "share", "higher"),
)


@dataclass(frozen=True)
class Probes:
    """Items that all models are measured on.

    Args:
        tuning: windows of held-out text that judge learning rates and nothing else.
        heldout: other windows of it.
        outside: windows of other text.
        outside_digest: of that text.
        needles: texts with needles.
        many_shot: lists of examples.
        maps: sequences for the comparison of heads.
    """

    tuning: list[Item]
    heldout: list[Item]
    outside: list[Item]
    outside_digest: str
    needles: list[AnswerItem]
    many_shot: list[AnswerItem]
    maps: list[torch.Tensor]


def make_probes(settings: StudySettings, base: Path, text: Text, work: Path) -> Probes:
    """Make the items; the same settings and texts give the same ones.

    Raises:
        UserError: a text is too short for its windows, or the text outside is the one to adapt to.
    """
    tokenizer: Any = load_tokenizer(base)
    tuned = settings.tuning_windows if len(settings.rates) > 1 else 0
    windows = _windows(text.heldout, settings.length, settings.heldout_windows + tuned, "data")
    documents = query_documents() if settings.outside is None else load_documents(settings.outside)
    if same := {d.text for d in documents} & {d.text for d in text.documents}:
        raise UserError(
            f"outside: expected other text than data, got {len(same)} documents that are in both"
        )
    outside = encode_documents(documents, base, work, "outside")
    haystack = split_documents(load_documents(None))[1]
    ids = [torch.as_tensor(item["input_ids"])[:, :_MAP_TOKENS] for item in windows]
    return Probes(
        tuning=windows[:tuned],
        heldout=windows[tuned:],
        outside=_windows(outside, settings.length, settings.outside_windows, "outside"),
        outside_digest=corpus_digest(documents),
        needles=needle_items(haystack, tokenizer, context=settings.context, count=settings.items),
        many_shot=many_shot_items(tokenizer, context=settings.context, count=settings.items),
        maps=ids[tuned : tuned + _MAP_SEQUENCES],
    )


def _windows(tokens: TokenFile, length: int, count: int, name: str) -> list[Item]:
    windows = Windows(tokens, length, seed=0)
    if count > len(windows):
        raise UserError(
            f"{name}: expected at least {count} windows of {length:,} tokens that no run trains "
            f"on, got {len(windows)} ({tokens.tokens:,} tokens)"
        )
    stream = TextStream(windows, rows_per_step=1, steps=count)
    return [stream[index] for index in range(count)]


def measure(model: Any, probes: Probes) -> dict[str, list[float]]:
    """Every measure of a model, item by item."""
    needles = answer_outcomes(model, probes.needles)
    shots = answer_outcomes(model, probes.many_shot)
    return {
        "heldout_loss": item_losses(model, probes.heldout).tolist(),
        "outside_loss": item_losses(model, probes.outside).tolist(),
        "needle_loss": [outcome.loss for outcome in needles],
        "needle_accuracy": [outcome.accuracy for outcome in needles],
        "many_shot_loss": [outcome.loss for outcome in shots],
        "many_shot_accuracy": [outcome.accuracy for outcome in shots],
    }


def measure_heads(model: Any, probes: Probes) -> dict[str, list[float | None]]:
    """Redundancy of the heads, layer by layer."""
    found = head_redundancy(model, probes.maps)
    values = {"map_distance": found.map_distance, "output_cka": found.output_cka}
    # a layer of one head has no pairs
    return {name: [v if v == v else None for v in row] for name, row in values.items()}
