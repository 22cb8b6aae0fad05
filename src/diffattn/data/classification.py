"""Texts with labels: bundled, or from a file; split into demonstrations and test items."""

from __future__ import annotations

import csv
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from diffattn.data.many_shot import Example
from diffattn.errors import UserError

BUNDLED = ("banking77", "clinc150")
_FIELDS = {"banking77": ("query", "intent"), "clinc150": ("utterance", "intent")}
_LONGEST = 0.99  # quantile of lengths; longer texts are left out


@cache
def labelled_texts(source: str) -> tuple[Example, ...]:
    """Examples of a bundled set or of a file.

    Args:
        source: a name of `BUNDLED`, or a path of CSV (columns text and label), JSON lines (keys
            text and label), or a BIG-bench task (JSON with `examples`); each also as `.xz`.

    Returns:
        Texts with labels; blanks normalised, underscores of labels replaced, no text twice.

    Raises:
        UserError: the file cannot be read, lacks a field, or holds fewer than two labels.
    """
    path = Path(source).expanduser()
    if source in BUNDLED:
        path = Path(__file__).with_name(f"{source}.jsonl.xz")
    try:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            records = list(_records(file, path))
    except (OSError, lzma.LZMAError, ValueError, csv.Error) as error:
        raise UserError(
            f"data: expected {', '.join(BUNDLED)}, or a CSV or JSONL file of text and label, got "
            f"{source} ({error})"
        ) from error
    found: dict[str, str] = {}
    for place, record in enumerate(records, 1):
        text, label = (
            record.get(key) if isinstance(record, dict) else None for key in ("text", "label")
        )
        if not isinstance(text, str) or not isinstance(label, str):
            raise UserError(f"data: expected text and label in record {place} of {source}")
        words, name = " ".join(text.split()), " ".join(label.replace("_", " ").split())
        if not words or not name:
            raise UserError(f"data: text or label is empty in record {place} of {source}")
        found.setdefault(words, name)
    if len(set(found.values())) < 2:
        raise UserError(f"data: expected two labels or more in {source}")
    return tuple(found.items())


def _records(file: Any, path: Path) -> Iterator[Any]:
    kind = Path(path.stem).suffix if path.suffix == ".xz" else path.suffix
    if kind == ".csv":
        yield from csv.DictReader(file)
    elif kind == ".json":
        task = json.load(file)
        if not isinstance(task, dict) or not isinstance(task.get("examples"), list):
            raise ValueError("no list `examples`")
        for example in task["examples"]:
            try:
                scores = example["target_scores"]
                label = max(scores, key=scores.get)
                yield {"text": example["input"].removeprefix("Utterance: "), "label": label}
            except (KeyError, TypeError, ValueError, AttributeError):
                raise ValueError("an example without input and target_scores") from None
    else:
        for line in file:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def field_names(source: str) -> tuple[str, str]:
    """What a text and its label are called in a prompt."""
    return _FIELDS.get(source, ("text", "label"))


@dataclass(frozen=True)
class LabelledSplit:
    """Demonstrations in a fixed order, and test items.

    Args:
        shots: the first n are the demonstrations of n shots, so that they are nested.
        tests: texts that are not among them.
        labels: of all.
    """

    shots: tuple[Example, ...]
    tests: tuple[Example, ...]
    labels: tuple[str, ...]

    @property
    def majority(self) -> float:
        """Share of test items that have the most frequent label."""
        labels = [label for _, label in self.tests]
        return max(labels.count(label) for label in set(labels)) / len(labels)


def split_labelled(
    examples: Sequence[Example], *, tests: int, classes: int | None = None, seed: int = 0
) -> LabelledSplit:
    """Draw test items and the order of demonstrations.

    Args:
        examples: texts with labels.
        tests: test items.
        classes: that are drawn; None means all.
        seed: of the draw.

    Raises:
        UserError: there are fewer classes, or no demonstrations are left.

    Source: Bertsch et al., arXiv 2405.00200. Differs: lengths are counted in characters, so that
        models with different tokenizers get the same items.
    """
    rng = np.random.default_rng(seed)
    labels = sorted({label for _, label in examples})
    if classes is not None:
        if not 2 <= classes <= len(labels):
            raise UserError(f"classes: expected 2 to {len(labels)}, got {classes}")
        labels = sorted(labels[n] for n in rng.permutation(len(labels))[:classes])
    kept = [example for example in examples if example[1] in set(labels)]
    kept = [kept[n] for n in rng.permutation(len(kept))]
    if not 1 <= tests < len(kept):
        raise UserError(f"tests: expected 1 to {len(kept) - 1}, got {tests}")
    asked, shots = _not_long(kept[:tests]), _not_long(kept[tests:])
    return LabelledSplit(shots, asked, tuple(labels))


def _not_long(examples: Sequence[Example]) -> tuple[Example, ...]:
    longest = np.quantile([len(text) for text, _ in examples], _LONGEST)
    return tuple(example for example in examples if len(example[0]) <= longest)
