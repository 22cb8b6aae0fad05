"""Draws measured values on the axes of a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from diffattn.compare.plot_series import Cell, DrawnArm, Lines, Point, mean
from diffattn.compare.rows import (
    Measure,
    MeasureRow,
)
from diffattn.report.numbers import MISSING
from diffattn.report.palette import BAND, HEAT, INK, MUTED, ON_HEAT, VERDICT_COLORS
from diffattn.report.verdicts import BETTER, DECIDED, NO_DIFFERENCE, WORSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

ARMS_PER_LINE: Final = 4

_VERDICT_MARKERS: Final = {BETTER: ">", NO_DIFFERENCE: "o", WORSE: "<"}


def curves(ax: Axes, lines: Iterable[Lines]) -> None:
    """Draws lines over many places, marked at their last known point."""
    for line in lines:
        for seed in line.seeds if len(line.seeds) > 1 else ():
            ax.plot(*_split(seed.values()), color=line.arm.color, linewidth=0.8, alpha=0.4)
        points = enumerate(line.mean.values())
        known = [place for place, (x, y) in points if math.isfinite(x + y)]
        ax.plot(
            *_split(line.mean.values()),
            color=line.arm.color,
            linewidth=2.0,
            marker=line.arm.marker,
            markersize=5.5,
            markevery=known[-1:],
        )


def enlarge(ax: Axes, lines: Iterable[Lines]) -> None:
    """Limits an axis to the second half of every line."""
    late = [
        point
        for line in lines
        for seed in line.seeds
        for point in list(seed.values())[len(seed) // 2 :]
        if math.isfinite(point[0] + point[1])
    ]
    if not late:
        return
    for limit, values in zip((ax.set_xlim, ax.set_ylim), _split(late), strict=True):
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        limit(low - margin, high + margin)


def category_lines(ax: Axes, lines: Sequence[Lines], ticks: Mapping[float, str]) -> None:
    """Draws lines over few places, side by side so that equal values stay visible."""
    places = {key: place for place, key in enumerate(ticks)}
    for index, line in enumerate(lines):
        shift = 0.05 * (index - (len(lines) - 1) / 2.0)
        for seed in line.seeds if len(line.seeds) > 1 else ():
            xs, ys = _placed(seed, places, shift)
            ax.plot(xs, ys, color=line.arm.color, linewidth=0.8, alpha=0.45, marker=".")
        xs, ys = _placed(line.mean, places, shift)
        ax.plot(xs, ys, color=line.arm.color, linewidth=2.0, marker=line.arm.marker, markersize=5.5)
    ax.set_xticks(range(len(ticks)), list(ticks.values()))
    ax.set_xlim(-0.5, len(ticks) - 0.5)
    ax.grid(visible=False, axis="x")


def heatmap(
    ax: Axes,
    arm: DrawnArm,
    means: Mapping[tuple[Cell, float], float],
    rows: Sequence[Cell],
    depths: Sequence[float],
) -> None:
    """Draws a number in every cell, on a colour for how high it is; the rows go by length."""
    ticks: dict[float, str] = {}
    top = 0.0
    for index, row in enumerate(rows):
        if index == 0 or row[0] != rows[index - 1][0]:
            ax.text(-0.5, top + 0.1, f"{row[0]:,} tokens", va="center", color=MUTED, fontsize=8)
            top += 0.9
        ticks[top] = f"N={row[1]}, R={row[2]}"
        for column, depth in enumerate(depths):
            _heat_cell(ax, column, top, means.get((row, depth), math.nan))
        top += 1.0
    ax.set_title(arm.label, color=arm.color, fontweight="bold")
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_xticks(range(len(depths)), [f"{100.0 * depth:.0f} %" for depth in depths])
    ax.set_xlim(-0.55, len(depths) - 0.45)
    ax.set_ylim(top - 0.45, -0.4)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def bars(ax: Axes, arms: Sequence[DrawnArm], shares: Sequence[Sequence[float]]) -> None:
    """Draws the mean of every arm as a bar, its seeds as dots."""
    for place, (arm, values) in enumerate(zip(arms, shares, strict=True)):
        middle = mean(values)
        if not math.isfinite(middle):
            ax.text(0.0, place, f" {MISSING}", va="center", color=MUTED)
            continue
        ax.barh(place, middle, height=0.62, color=arm.color, alpha=0.55)
        dots = values if len(values) > 1 else ()
        ax.plot(dots, [place] * len(dots), arm.marker, color=arm.color, markersize=3.6)
        end = max(middle, *values)
        ax.annotate(
            f"{middle:.1f} %", (end, place), (5, 0), textcoords="offset points", va="center"
        )
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0.0, 1.22 * max(v for values in shares for v in values if math.isfinite(v)) or 1.0)
    ax.grid(visible=False)


def arm_rows(ax: Axes, arms: Sequence[DrawnArm]) -> None:
    """Names the arms on the left of their bars."""
    ax.set_yticks(range(len(arms)), [arm.label for arm in arms])
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.tick_params(axis="y", labelcolor=INK)


def forest(
    ax: Axes,
    arm: DrawnArm,
    table: Sequence[MeasureRow],
    heights: Mapping[Measure, float],
) -> None:
    """Draws the differences of one arm below one another, each on the scale of its measure."""
    for height in list(heights.values())[::2]:
        ax.axhspan(height - 0.5, height + 0.5, color=BAND, linewidth=0)
    ax.axvline(0.0, color=MUTED, linewidth=1.0)
    for row in (row for row in table if row.arm == arm.name):
        reach = max(_reach(other) for other in table if other.measure == row.measure)
        _forest_row(ax, row, heights[row.measure], reach or 1.0)
    ax.set_title(arm.label, color=arm.color, fontweight="bold", pad=20)
    for x, text, align in (
        (-0.08, "← worse", "right"),
        (0.08, "better →", "left"),
        (1.95, "difference", "right"),
    ):
        above = ax.get_xaxis_transform()
        ax.text(x, 1.02, text, ha=align, transform=above, fontsize=8, color=MUTED)
    ax.set_xlim(-1.12, 2.0)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def arm_legend(fig: Figure, lines: Iterable[Lines]) -> None:
    """Names the arm of every line above a figure."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=line.arm.color, marker=line.arm.marker, linewidth=2.0, markersize=5.5)
        for line in lines
    ]
    _legend(fig, handles, [line.arm.label for line in lines])


def heat_legend(fig: Figure) -> None:
    """Says above a figure which colour stands for which share."""
    from matplotlib.patches import Patch

    steps = (0, 25, 50, 75, 100)
    handles = [Patch(facecolor=HEAT, alpha=_shade(step)) for step in steps]
    names = [f"{step} %" for step in steps]
    title = "needles recalled"
    legend = fig.legend(handles, names, loc="outside upper left", ncols=len(steps), title=title)
    legend.set_alignment("left")


def verdict_legend(fig: Figure, verdicts: set[str]) -> None:
    """Names above a figure those verdicts that have a mark in it."""
    from matplotlib.lines import Line2D

    shown = [verdict for verdict in _VERDICT_MARKERS if verdict in verdicts]
    handles = [
        Line2D(
            [],
            [],
            color=VERDICT_COLORS[verdict],
            marker=_VERDICT_MARKERS[verdict],
            markerfacecolor=VERDICT_COLORS[verdict] if verdict in DECIDED else BAND,
            linewidth=2.2,
        )
        for verdict in shown
    ]
    _legend(fig, handles, shown)


def _legend(fig: Figure, handles: Sequence[Line2D], names: Sequence[str]) -> None:
    columns = min(len(names), ARMS_PER_LINE)
    fig.legend(handles, names, loc="outside upper left", ncols=columns, fontsize=9)


def _split(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _placed(
    points: Mapping[float, Point], places: Mapping[float, int], shift: float
) -> tuple[list[float], list[float]]:
    return _split([(places[key] + shift, y) for key, (_, y) in points.items() if key in places])


def _heat_cell(ax: Axes, column: float, row: float, percent: float) -> None:
    from matplotlib.patches import Rectangle

    known = math.isfinite(percent)
    corner = (column - 0.48, row - 0.46)
    shade = _shade(percent) if known else 0.0
    ax.add_patch(Rectangle(corner, 0.96, 0.92, facecolor=HEAT, edgecolor="none", alpha=shade))
    color = ON_HEAT if shade > 0.7 else INK if known else MUTED
    text = f"{percent:.0f}" if known else MISSING
    cell = ax.text(column, row, text, ha="center", va="center_baseline", fontsize=8, color=color)
    cell.set_in_layout(False)


def _shade(percent: float) -> float:
    return 0.06 + 0.0094 * percent


def _reach(row: MeasureRow) -> float:
    """How far from zero a row needs to be drawn."""
    values = [abs(value) for value in (row.raw_difference, *(row.raw_interval or ()))]
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _forest_row(ax: Axes, row: MeasureRow, height: float, reach: float) -> None:
    scale = row.measure.sign / reach
    color = VERDICT_COLORS[row.verdict]
    decided = row.verdict in DECIDED
    if row.raw_interval is not None:
        ends = [scale * end for end in row.raw_interval]
        ax.plot(ends, [height, height], color=color, linewidth=2.2, solid_capstyle="butt")
    if math.isfinite(row.raw_difference):
        ax.plot(
            [scale * row.raw_difference],
            [height],
            _VERDICT_MARKERS[row.verdict],
            color=color,
            markerfacecolor=color if decided else BAND,
            markersize=7.0 if decided else 5.0,
        )
    text = ax.text(1.95, height, row.difference, ha="right", va="center_baseline", fontsize=8.5)
    text.set(in_layout=False, color=color if decided else MUTED)
    text.set_fontweight("bold" if decided else "normal")
