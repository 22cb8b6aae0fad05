"""Reads the results of a comparison into rows of text, one per arm or per difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diffattn.report.numbers import (
    MISSING,
    SPACE,
    Scale,
    count_text,
    number,
    scale_of,
    with_unit,
)
from diffattn.report.verdicts import NO_DIFFERENCE

Results = Mapping[str, Any]

HEADLINES: Final = (
    "heldout_loss",
    "recall",
    "attention_answer",
    "attention_noise",
    "tokens_per_second",
)

_ATTENTION_NAMES: Final = {"v1": "V1", "v2": "V2"}


@dataclass(frozen=True)
class Measure:
    """One thing that is measured for every arm.

    Attributes:
        name: The name in the results.
        label: The name for readers.
        unit: The unit of the stored value.
        better: Which direction is better, "lower" or "higher".
    """

    name: str
    label: str
    unit: str
    better: str

    @property
    def scale(self) -> Scale:
        """How the numbers of this measure are printed."""
        return scale_of(self.unit)

    @property
    def group(self) -> str:
        """Which measures belong together: the cells of one break-down share a group."""
        return self.name.partition("=")[0] if "[" in self.name else ""

    @property
    def sign(self) -> float:
        """One where a higher value is better, minus one where a lower value is."""
        return -1.0 if self.better == "lower" else 1.0


@dataclass(frozen=True)
class MeasureRow:
    """One comparison: one arm against its reference on one measure.

    Attributes:
        measure: What was measured.
        arm: The name of the arm.
        arm_label: The arm's name for readers.
        against_label: The name for readers of the arm that it is compared with.
        value: The arm's mean over seeds, as text.
        reference: The reference's mean over seeds, as text.
        difference: The arm minus its reference, as text.
        interval: The interval of the difference, as text.
        smallest: The smallest difference the run could have detected, as text.
        verdict: One of `VERDICTS`.
        reason: Why there is no interval, empty where there is one.
        raw_difference: The difference as a number, NaN where there is none.
        raw_interval: The interval as numbers, within the differences that there can be; None where
            there is none.
        cut: Whether that cut the interval.
        raw_smallest: The smallest detectable difference as a number, NaN where there is none.
    """

    measure: Measure
    arm: str
    arm_label: str
    against_label: str
    value: str
    reference: str
    difference: str
    interval: str
    smallest: str
    verdict: str
    reason: str
    raw_difference: float
    raw_interval: tuple[float, float] | None
    cut: bool
    raw_smallest: float


@dataclass(frozen=True)
class Statistic:
    """The mean over seeds and its spread, as text.

    Attributes:
        mean: The mean.
        sd: The standard deviation between seeds, empty where there is none.
        text: Both together.
    """

    mean: str
    sd: str
    text: str


@dataclass(frozen=True)
class ArmRow:
    """One arm at a glance.

    Attributes:
        name: The arm's name in the results.
        label: The arm's name for readers.
        detail: The arm's attention and heads, as text.
        parameters: How many parameters it has, as text.
        body_parameters: How many of them are not embeddings, as text.
        flops: Floating-point operations per token, as text.
        values: Mean and spread over seeds by measure name.
        comparisons: The arm's comparison by measure name, empty for the reference.
    """

    name: str
    label: str
    detail: str
    parameters: str
    body_parameters: str
    flops: str
    values: Mapping[str, Statistic]
    comparisons: Mapping[str, MeasureRow]


def labels(results: Results) -> dict[str, str]:
    """Names every arm for readers, in the order of the results."""
    return {arm["name"]: str(arm.get("label") or arm["name"]) for arm in results.get("arms") or ()}


def family(results: Results) -> Mapping[str, Any]:
    """Reads what the intervals have in common, empty where there are none."""
    return results.get("family") or {}


def level_text(results: Results) -> str:
    """Prints the joint confidence level, such as '95 %'."""
    level = number(family(results).get("level"))
    return MISSING if math.isnan(level) else with_unit(f"{100.0 * level:g}", "%")


def measure_table(results: Results) -> list[MeasureRow]:
    """Lists every comparison, grouped by measure and in the order of the arms.

    Args:
        results: The results of a comparison.

    Returns:
        One row per comparison.
    """
    by_key = {(item["measure"], item["arm"]): item for item in results.get("comparisons") or ()}
    names = labels(results)
    return [
        _measure_row(results, names, measure, by_key[measure.name, arm])
        for measure in _measures(results)
        for arm in names
        if (measure.name, arm) in by_key
    ]


def arm_table(results: Results) -> list[ArmRow]:
    """Lists every arm at a glance, in the order of the results."""
    rows = measure_table(results)
    units = {measure.name: measure.unit for measure in _measures(results)}
    return [_arm_row(results, arm, units, rows) for arm in results.get("arms") or ()]


def _measures(results: Results) -> list[Measure]:
    """Lists the measures: those of the whole run first, then the break-downs."""
    listed = [
        Measure(
            name=item["name"],
            label=str(item.get("label") or item["name"]),
            unit=str(item.get("unit") or ""),
            better=str(item.get("better") or "higher"),
        )
        for item in results.get("measures") or ()
    ]
    return sorted(listed, key=lambda measure: measure.group != "")


def _statistics(results: Results, arm: str, measure: str) -> Mapping[str, Any]:
    return ((results.get("values") or {}).get(arm) or {}).get(measure) or {}


def _interval(item: Mapping[str, Any]) -> tuple[float, float] | None:
    ends = item.get("interval")
    if ends is None:
        return None
    low, high = (number(end) for end in ends)
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def _measure_row(
    results: Results, names: Mapping[str, str], measure: Measure, item: Mapping[str, Any]
) -> MeasureRow:
    scale, arm, against = measure.scale, item["arm"], item["against"]
    difference = number(item.get("difference"))
    whole = _interval(item)
    interval = None if whole is None else scale.possible(whole)
    smallest = number(item.get("smallest_detectable"))
    return MeasureRow(
        measure=measure,
        arm=arm,
        arm_label=names[arm],
        against_label=names.get(against, str(against)),
        value=scale.value(_statistics(results, arm, measure.name).get("mean")),
        reference=scale.value(_statistics(results, against, measure.name).get("mean")),
        difference=scale.difference(difference),
        interval=scale.interval(interval),
        smallest=scale.smallest(smallest),
        verdict=str(item.get("verdict") or NO_DIFFERENCE),
        reason="" if interval else str(item.get("reason") or "no interval"),
        raw_difference=difference,
        raw_interval=interval,
        cut=interval != whole,
        raw_smallest=smallest,
    )


def _arm_row(
    results: Results,
    arm: Mapping[str, Any],
    units: Mapping[str, str],
    rows: Iterable[MeasureRow],
) -> ArmRow:
    name = arm["name"]
    return ArmRow(
        name=name,
        label=str(arm.get("label") or name),
        detail=_detail(arm),
        parameters=count_text(arm.get("parameters")),
        body_parameters=count_text(arm.get("parameters_non_embedding")),
        flops=count_text(arm.get("flops_per_token")),
        values={
            headline: _statistic(
                scale_of(units.get(headline, "")), _statistics(results, name, headline)
            )
            for headline in HEADLINES
        },
        comparisons={row.measure.name: row for row in rows if row.arm == name},
    )


def _detail(arm: Mapping[str, Any]) -> str:
    """Says what attends in an arm, such as 'V1: 2 differential heads'."""
    attention = str(arm.get("attention") or "")
    parts = (_ATTENTION_NAMES.get(attention, attention), str(arm.get("heads") or ""))
    return ": ".join(part for part in parts if part)


def _statistic(scale: Scale, item: Mapping[str, Any]) -> Statistic:
    mean, sd = number(item.get("mean")), number(item.get("sd"))
    if math.isnan(mean) or math.isnan(sd):
        return Statistic(scale.value(mean), "", scale.value(mean))
    spread = f"±{SPACE}{scale.bare(sd)}"
    text = with_unit(f"{scale.bare(mean)}{SPACE}{spread}", scale.suffix)
    return Statistic(scale.value(mean), spread, text)
