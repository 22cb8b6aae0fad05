"""Reads from the results of a comparison what its figures draw."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from diffattn.compare.rows import Results, labels
from diffattn.report.numbers import number
from diffattn.report.palette import ARM_COLORS

Point = tuple[float, float]
Cell = tuple[int, int, int]
Run = Mapping[str, Any]

_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class DrawnArm:
    """How one arm looks in every figure, with its runs."""

    name: str
    label: str
    color: str
    marker: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Lines:
    """The lines of one arm, one per seed with their mean: points by step, depth and so on."""

    arm: DrawnArm
    seeds: Sequence[Mapping[float, Point]]
    mean: Mapping[float, Point]

    def divided(self, size: float) -> Lines:
        """Measures where the points are in a larger unit."""

        def scaled(points: Mapping[float, Point]) -> dict[float, Point]:
            return {key: (x / size, y) for key, (x, y) in points.items()}

        return Lines(self.arm, [scaled(seed) for seed in self.seeds], scaled(self.mean))


def drawn_arms(results: Results) -> list[DrawnArm]:
    """Gives every arm its colour, in the order of the results."""
    names = labels(results)
    return [
        DrawnArm(
            name=arm["name"],
            label=names[arm["name"]],
            color=ARM_COLORS[index % len(ARM_COLORS)],
            marker=_MARKERS[index % len(_MARKERS)],
            runs=arm.get("runs") or (),
        )
        for index, arm in enumerate(results.get("arms") or ())
    ]


def mean(values: Sequence[float]) -> float:
    """Averages numbers; of none, or with one missing, the mean is NaN."""
    return sum(values) / len(values) if values else math.nan


def known_places(lines: Iterable[Lines]) -> list[float]:
    """Lists where any line has a value."""
    seeds = (seed for line in lines for seed in line.seeds)
    return sorted({key for seed in seeds for key, (x, y) in seed.items() if math.isfinite(x + y)})


def loss_lines(arm: DrawnArm, loss: str, axis: str) -> Lines:
    """Reads the points (axis, loss) by step: seeds differ in speed, so both are averaged."""
    return _lines(
        arm,
        (
            {
                point["step"]: (number(point.get(axis)), number(point.get(loss)))
                for point in run.get("curve") or ()
                if point.get(loss) is not None
            }
            for run in arm.runs
        ),
    )


def recall_lines(arm: DrawnArm) -> Lines:
    """Reads the mean recall in percent by length of the context."""
    return _placed(
        arm, (_means((item["length"], _percent(item)) for item in _recall(run)) for run in arm.runs)
    )


def recall_cells(arm: DrawnArm) -> dict[tuple[Cell, float], float]:
    """Reads the mean recall in percent by cell (length, needles, queries) with depth."""
    return _means(
        (((item["length"], item["needles"], item["queries"]), item["depth"]), _percent(item))
        for run in arm.runs
        for item in _recall(run)
    )


def attention_shares(arm: DrawnArm, key: str) -> list[float]:
    """Reads the percentage of attention on one thing, by seed."""
    return [100.0 * number(_attention(run).get(key)) for run in arm.runs]


def attention_lines(arm: DrawnArm, key: str) -> Lines:
    """Reads the percentage of attention on one thing by depth."""
    return _placed(
        arm,
        (
            {
                item["depth"]: 100.0 * number(item.get(key))
                for item in _attention(run).get("by_depth") or ()
            }
            for run in arm.runs
        ),
    )


def lam_lines(arm: DrawnArm) -> Lines:
    """Reads λ by layer, counted from zero."""
    return _placed(
        arm,
        (
            {layer: number(lam) for layer, lam in enumerate(run.get("lam") or ())}
            for run in arm.runs
        ),
    )


def _recall(run: Run) -> Sequence[Mapping[str, Any]]:
    return run.get("recall") or ()


def _attention(run: Run) -> Mapping[str, Any]:
    return run.get("attention") or {}


def _percent(item: Mapping[str, Any]) -> float:
    return 100.0 * number(item.get("accuracy"))


def _means(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Averages the values that share a key."""
    values: dict[_Key, list[float]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {key: mean(found) for key, found in values.items()}


def _placed(arm: DrawnArm, seeds: Iterable[Mapping[float, float]]) -> Lines:
    return _lines(arm, ({x: (x, y) for x, y in seed.items()} for seed in seeds))


def _lines(arm: DrawnArm, seeds: Iterable[Mapping[float, Point]]) -> Lines:
    """Sorts the points of every seed, then averages the places that every seed has."""
    drawn = [dict(sorted(points.items())) for points in seeds if points]
    common = [key for key in drawn[0] if all(key in points for points in drawn)] if drawn else []
    return Lines(arm, drawn, {key: _middle([points[key] for points in drawn]) for key in common})


def _middle(points: Sequence[Point]) -> Point:
    return mean([x for x, _ in points]), mean([y for _, y in points])
