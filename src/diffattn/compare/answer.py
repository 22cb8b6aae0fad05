"""Says in plain language what a comparison found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diffattn.compare.rows import (
    HEADLINES,
    MeasureRow,
    Results,
    family,
    level_text,
    measure_table,
)
from diffattn.report.numbers import number, plural, with_unit
from diffattn.report.verdicts import DECIDED, NO_DIFFERENCE, VERDICTS

_NAMES_IN_A_SENTENCE: Final = 6


@dataclass(frozen=True)
class ArmAnswer:
    """What the run says about one arm, in one sentence.

    Attributes:
        arm: The name of the arm.
        label: The arm's name for readers.
        text: What follows the label, with the space or colon between them.
        counts: How many measures got each verdict, in the order of `VERDICTS`.
    """

    arm: str
    label: str
    text: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Answer:
    """What the run says, in plain language.

    Attributes:
        lead: The words before the sentences about arms.
        arms: One sentence per compared arm.
        explanations: What the words of the sentences mean.
    """

    lead: str
    arms: Sequence[ArmAnswer]
    explanations: Sequence[str]


def answer(results: Results) -> Answer:
    """Says in plain language what the comparison found.

    Args:
        results: The results of a comparison.

    Returns:
        The answer, one sentence per compared arm and the explanation of its words.
    """
    rows = measure_table(results)
    if not rows:
        return Answer("This run compares nothing: it holds no second arm.", (), ())
    seeds = plural(len(results.get("seeds") or ()), "seed")
    against = ", ".join(dict.fromkeys(row.against_label for row in rows))
    arms = [
        _arm_answer([row for row in rows if row.arm == arm])
        for arm in dict.fromkeys(row.arm for row in rows)
    ]
    return Answer(f"Against {against}, with {seeds}:", arms, _explanations(results, rows, seeds))


def _arm_answer(rows: Sequence[MeasureRow]) -> ArmAnswer:
    counter = Counter(row.verdict for row in rows)
    counts = {verdict: counter[verdict] for verdict in VERDICTS}
    return ArmAnswer(rows[0].arm, rows[0].arm_label, _sentence(rows, counts), counts)


def _sentence(rows: Sequence[MeasureRow], counts: Mapping[str, int]) -> str:
    total = plural(len(rows), "measure")
    parts: list[str] = []
    for verdict in DECIDED:
        if counts[verdict]:
            of_total = "" if parts else f" of {total}"
            chosen = [row.measure.label for row in rows if row.verdict == verdict]
            parts.append(f"{verdict} on {counts[verdict]}{of_total} ({_names(chosen)})")
    clauses = [f" is {', '.join(parts)}"] if parts else []
    reasons = Counter(row.reason for row in rows if row.verdict == NO_DIFFERENCE)
    for reason, count in sorted(reasons.items()):
        where = _where(count, total, parts, counts[NO_DIFFERENCE] - count)
        why = f" ({reason})" if reason else ""
        clauses.append(f"on {where} this run shows no difference{why}")
    return f"{'' if parts else ': '}{'; '.join(clauses)}."


def _where(count: int, total: str, decided: Sequence[str], others: int) -> str:
    """Names the measures of one clause: all of them, the rest, or some of them."""
    if not decided and not others:
        return total if count == 1 else f"all {total}"
    if others:
        return f"{count} of {total}"
    return f"the other {'one' if count == 1 else count}"


def _names(names: Sequence[str]) -> str:
    between = "; " if any("," in name for name in names) else ", "
    if len(names) <= _NAMES_IN_A_SENTENCE:
        return between.join(names)
    shown = _NAMES_IN_A_SENTENCE - 1
    return f"{between.join(names[:shown])} and {len(names) - shown} more"


def _explanations(results: Results, rows: Sequence[MeasureRow], seeds: str) -> list[str]:
    if all(row.raw_interval is None for row in rows):
        return [
            f"{rows[0].reason.capitalize()}, so this run cannot tell a difference between the arms "
            "from chance: add seeds, as in --seeds 3 --resume."
        ]
    sentences = [
        "“No difference” means that the interval of the difference contains zero. It does not "
        "show that the arms are equal, only that this run cannot tell them apart."
    ]
    detectable = _detectable(rows)
    if detectable:
        sentences.append(
            f"With {seeds}, the smallest differences this run could have detected are "
            f"{', '.join(detectable)}; anything smaller goes unseen."
        )
    unseen = [row.measure.label for row in rows if row.raw_smallest > row.measure.scale.largest]
    if unseen:
        sentences.append(
            f"It could not have detected even the largest difference there can be in "
            f"{_names(list(dict.fromkeys(unseen)))}."
        )
    if any(row.cut for row in rows):
        sentences.append(
            "Intervals of percentages are cut at 100 points, beyond which no difference can lie."
        )
    shared = family(results)
    level = number(shared.get("level"))
    if math.isfinite(level):
        sentences.append(
            f"All {shared.get('comparisons', len(rows))} intervals hold jointly at "
            f"{level_text(results)}: the chance that even one of them misses the true difference "
            f"is about {with_unit(f'{100.0 * (1.0 - level):.3g}', '%')}. "
            f"{shared.get('method') or ''}".rstrip()
        )
    return sentences


def _detectable(rows: Sequence[MeasureRow]) -> list[str]:
    texts: list[str] = []
    for headline in HEADLINES:
        chosen = [r for r in rows if r.measure.name == headline and not math.isnan(r.raw_smallest)]
        if chosen:
            largest = max(chosen, key=lambda row: row.raw_smallest)
            scale = largest.measure.scale
            if largest.raw_smallest <= scale.largest:
                size = scale.size(largest.raw_smallest, unit=True)
                texts.append(f"{size} in {largest.measure.label}")
    return texts
