"""Draws the figures of a comparison as SVG text that suits light and dark pages alike."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final, Literal

from diffattn.compare.table import (
    BETTER,
    MISSING,
    NO_DIFFERENCE,
    UNDECIDED,
    WORSE,
    Measure,
    MeasureRow,
    Results,
    labels,
    measure_table,
    number,
)
from diffattn.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WORDS: Final = 'class="words"'
INK: Final = "#24292e"
MUTED: Final = "#5f6873"
GRID: Final = "#dfe3e8"
BAND: Final = "#f3f5f8"
HEAT: Final = "#075a91"
ON_HEAT: Final = "#fefefe"
ARM_COLORS: Final = ("#24292f", "#0067b0", "#d98200", "#a8125f", "#4a9fcf", "#7d7a12")
VERDICT_COLORS: Final = {
    BETTER: "#00805d",
    NO_DIFFERENCE: "#7d8690",
    WORSE: "#c8480a",
    UNDECIDED: "#7d8690",
    MISSING: "#7d8690",
}
DARK_COLORS: Final = {
    INK: "#e4e8ec",
    MUTED: "#9aa4af",
    GRID: "#30363d",
    BAND: "#1c2229",
    HEAT: "#5fb2ea",
    ON_HEAT: "#0b1015",
    "#24292f": "#e6edf3",
    "#0067b0": "#58a6e8",
    "#d98200": "#f0a830",
    "#a8125f": "#f0559f",
    "#4a9fcf": "#8f86ff",
    "#7d7a12": "#b3901c",
    "#00805d": "#35c99b",
    "#7d8690": "#8b949e",
    "#c8480a": "#ff8a50",
}

_ARM_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_VERDICT_MARKERS: Final = {
    BETTER: ">",
    WORSE: "<",
    NO_DIFFERENCE: "o",
    UNDECIDED: "D",
    MISSING: "x",
}
_WIDTH: Final = 10.4
_ROW: Final = 0.27
_ARMS_PER_LINE: Final = 4
_POINTS_TO_ENLARGE: Final = 4
_RC: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diffattn",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelsize": 9.0,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
_NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}

Point = tuple[float, float]
Read = Callable[[Mapping[str, Any]], dict[float, float]]


@dataclass(frozen=True)
class _Arm:
    """How one arm looks in every figure, with its runs."""

    name: str
    label: str
    color: str
    marker: str
    runs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Lines:
    """The lines of one arm: one per seed, and their mean."""

    arm: _Arm
    seeds: Sequence[Sequence[Point]]
    mean: Sequence[Point]


@dataclass(frozen=True)
class _Unit:
    """A unit large enough to keep the numbers on an axis short."""

    size: float
    name: str


def loss_over_tokens(results: Results) -> str:
    """Draws the loss against the tokens that were trained on.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    tokens = (_Unit(1e9, "billions"), _Unit(1e6, "millions"), _Unit(1e3, "thousands"))
    return _loss_figure(results, "tokens", "training tokens", (*tokens, _Unit(1.0, "")))


def loss_over_time(results: Results) -> str:
    """Draws the loss against the time that training took.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    units = (_Unit(3600.0, "hours"), _Unit(60.0, "minutes"), _Unit(1.0, "seconds"))
    return _loss_figure(results, "seconds", "training time", units)


def recall_heatmaps(results: Results) -> str:
    """Draws the recall of every arm in every cell, as numbers on a common colour scale.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "recall-heatmaps", "Recall by cell, depth and length"
    arms = _arms(results)
    rows = sorted({_cell(item) for arm in arms for run in arm.runs for item in _recall(run)})
    depths = sorted({item["depth"] for arm in arms for run in arm.runs for item in _recall(run)})
    if not rows:
        return _words(name, title, "This run did not measure recall.")
    with _style():
        lines = math.ceil(len(arms) / _ARMS_PER_LINE)
        blocks = len({row[0] for row in rows})
        height = lines * (_ROW * (len(rows) + 0.9 * blocks) + 0.55) + 0.75
        fig = _figure(_WIDTH, height)
        columns = min(len(arms), _ARMS_PER_LINE)
        grid = fig.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        axes = list(grid.flat)
        for ax, arm in zip(axes, arms, strict=False):
            _heatmap(ax, arm, rows, depths)
        for ax in axes[len(arms) :]:
            ax.set_axis_off()
        fig.supxlabel(
            "depth of the first needle asked for (0 % = start of the context)",
            color=MUTED,
            fontsize=9,
        )
        _heat_legend(fig)
        return _svg(fig, name, f"{title}, one heat map per arm: {_listing(arms)}.")


def recall_by_length(results: Results) -> str:
    """Draws the mean recall of every arm against the length of the context.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "recall-by-length", "Recall by length of the context"
    lines = [_lines(arm, _recall_lengths) for arm in _arms(results)]
    keys = _keys(lines)
    if not keys:
        return _words(name, title, "This run did not measure recall.")
    with _style():
        fig = _figure(_WIDTH, 3.3)
        ax = fig.subplots()
        _category_lines(ax, lines, [f"{key:,.0f}" for key in keys], keys)
        only = "; this run measured one length only" if len(keys) == 1 else ""
        ax.set_xlabel(f"length of the context (tokens{only})")
        ax.set_ylabel("needles recalled (%)")
        ax.set_ylim(-3.0, 103.0)
        _arm_legend(fig, lines)
        return _svg(fig, name, f"{title}, one line per arm: {_listing(_arms(results))}.")


def attention_bars(results: Results) -> str:
    """Draws where the attention of every arm goes: the answer, the noise, the first token.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "attention-bars", "Attention on the answer and on noise"
    arms = _arms(results)
    panels = [
        ("answer", "on the answer (more is better)"),
        ("noise", "on noise (less is better)"),
        ("first", "on the first token (neither)"),
    ]
    shares = {key: [_attention(arm, key) for arm in arms] for key, _ in panels}
    drawn = [panel for panel in panels if any(map(_any_finite, shares[panel[0]]))]
    if not drawn:
        return _words(name, title, "This run did not measure attention.")
    with _style():
        fig = _figure(_WIDTH, 0.42 * len(arms) + 0.95)
        axes = fig.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
        for ax, (key, heading) in zip(axes, drawn, strict=True):
            _bars(ax, arms, shares[key])
            ax.set_title(heading)
            ax.set_xlabel("share of attention (%)")
        _arm_rows(axes[0], arms)
        return _svg(fig, name, f"{title}, one bar per arm: {_listing(arms)}.")


def attention_by_depth(results: Results) -> str:
    """Draws the attention on the answer and on noise against the depth of the needle.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "attention-by-depth", "Attention by depth of the needle"
    arms = _arms(results)
    panels = {
        "on the answer": [_lines(arm, _attention_depths("answer")) for arm in arms],
        "on noise": [_lines(arm, _attention_depths("noise")) for arm in arms],
    }
    drawn = {heading: lines for heading, lines in panels.items() if _keys(lines)}
    if not drawn:
        return _words(name, title, "This run did not measure attention by depth.")
    with _style():
        fig = _figure(_WIDTH, 3.1)
        axes = fig.subplots(1, len(drawn), squeeze=False)[0]
        for ax, (heading, lines) in zip(axes, drawn.items(), strict=True):
            keys = _keys(lines)
            _category_lines(ax, lines, [f"{100.0 * key:.0f} %" for key in keys], keys)
            ax.set_title(heading)
            ax.set_xlabel("depth of the needle asked for")
            ax.set_ylabel("share of attention (%)")
            ax.set_ylim(bottom=0.0)
        _arm_legend(fig, next(iter(drawn.values())))
        return _svg(fig, name, f"{title}, one line per arm: {_listing(arms)}.")


def lam_by_layer(results: Results) -> str:
    """Draws the learned λ of every differential arm against the layer.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "lam-by-layer", "λ by layer"
    every = [_lines(arm, _lam_layers) for arm in _arms(results)]
    lines = [line for line in every if _keys([line])]
    if not lines:
        return _words(name, title, "No arm of this run has a λ to show.")
    without = [line.arm.label for line in every if line not in lines]
    with _style():
        fig = _figure(_WIDTH, 3.1)
        ax = fig.subplots()
        keys = _keys(lines)
        _category_lines(ax, lines, [f"{key:.0f}" for key in keys], keys)
        ax.set_xlabel("layer" + (f" (no λ: {'; '.join(without)})" if without else ""))
        ax.set_ylabel("λ (no unit)")
        _arm_legend(fig, lines)
        return _svg(fig, name, f"{title}: {_listing([line.arm for line in lines])}.")


def differences(results: Results) -> str:
    """Draws every difference with its interval, coloured by verdict; right is better.

    Every measure has its own scale, shared by the arms, so lengths compare along a row only.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "differences", "Differences with their intervals"
    table = measure_table(results)
    if not table:
        return _words(name, title, "This run compares nothing: it holds no second arm.")
    measures = list(dict.fromkeys(row.measure for row in table))
    heights = _heights(measures)
    arms = [arm for arm in _arms(results) if any(row.arm == arm.name for row in table)]
    with _style():
        depth = max(heights.values()) + 1.0
        fig = _figure(max(_WIDTH, 2.6 * len(arms) + 2.6), _ROW * depth + 1.0)
        axes = fig.subplots(1, len(arms), squeeze=False, sharey=True)[0]
        for ax, arm in zip(axes, arms, strict=True):
            _forest(ax, arm, [row for row in table if row.arm == arm.name], table, heights)
        axes[0].set_yticks(list(heights.values()), [_row_label(measure) for measure in measures])
        axes[0].tick_params(axis="y", labelcolor=INK)
        axes[0].set_ylim(depth - 0.4, -0.6)
        _verdict_legend(fig, {row.verdict for row in table})
        against = ", ".join(dict.fromkeys(row.against_label for row in table))
        return _svg(fig, name, f"{title} against {against}, one column per arm: {_listing(arms)}.")


@contextmanager
def _style() -> Iterator[None]:
    """Sets the common look, and says what to install where matplotlib is missing."""
    with needs_extra("a figure", "plot"):
        import matplotlib
        import matplotlib.figure
    with matplotlib.rc_context(_RC):
        yield


def _figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def _svg(fig: Figure, name: str, description: str) -> str:
    """Prints a figure as SVG that can stand beside others inside one page."""
    layout = fig.get_layout_engine()
    if layout is not None:
        layout.execute(fig)
        fig.set_layout_engine("none")
    stream = io.StringIO()
    fig.savefig(stream, format="svg", metadata=_NO_METADATA)
    text = stream.getvalue()
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(?<= )id="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def _words(name: str, title: str, sentence: str) -> str:
    """Says in words what a figure would have shown."""
    lines = textwrap.wrap(sentence, 120)
    with _style():
        fig = _figure(_WIDTH, 0.3 + 0.2 * len(lines), layout=None)
        fig.text(0.01, 0.5, "\n".join(lines), va="center", color=MUTED, fontsize=10)
        return _svg(fig, name, f"{title}: {sentence}").replace("<svg", f"<svg {WORDS}", 1)


def _arms(results: Results) -> list[_Arm]:
    names = labels(results)
    return [
        _Arm(
            name=arm["name"],
            label=names[arm["name"]],
            color=ARM_COLORS[index % len(ARM_COLORS)],
            marker=_ARM_MARKERS[index % len(_ARM_MARKERS)],
            runs=arm.get("runs") or (),
        )
        for index, arm in enumerate(results.get("arms") or ())
    ]


def _listing(arms: Iterable[_Arm]) -> str:
    return "; ".join(arm.label for arm in arms)


def _any_finite(values: Iterable[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _lines(arm: _Arm, read: Read) -> _Lines:
    """Reads one line per seed, and averages the places that every seed has."""
    seeds = [points for run in arm.runs if (points := read(run))]
    common = [x for x in seeds[0] if all(x in points for points in seeds)] if seeds else []
    mean = [(x, _mean([points[x] for points in seeds])) for x in sorted(common)]
    return _Lines(arm, [sorted(points.items()) for points in seeds], mean)


def _keys(lines: Iterable[_Lines]) -> list[float]:
    return sorted({x for line in lines for seed in line.seeds for x, y in seed if math.isfinite(y)})


def _recall(run: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return run.get("recall") or ()


def _cell(item: Mapping[str, Any]) -> tuple[int, int, int]:
    return item["length"], item["needles"], item["queries"]


def _recall_lengths(run: Mapping[str, Any]) -> dict[float, float]:
    by_length: dict[float, list[float]] = {}
    for item in _recall(run):
        by_length.setdefault(item["length"], []).append(100.0 * number(item.get("accuracy")))
    return {length: _mean(values) for length, values in by_length.items()}


def _attention(arm: _Arm, key: str) -> list[float]:
    return [100.0 * number((run.get("attention") or {}).get(key)) for run in arm.runs]


def _attention_depths(key: str) -> Read:
    def read(run: Mapping[str, Any]) -> dict[float, float]:
        items = (run.get("attention") or {}).get("by_depth") or ()
        return {item["depth"]: 100.0 * number(item.get(key)) for item in items}

    return read


def _lam_layers(run: Mapping[str, Any]) -> dict[float, float]:
    return {float(layer): number(lam) for layer, lam in enumerate(run.get("lam") or (), start=1)}


def _curve(run: Mapping[str, Any], loss: str, axis: str) -> dict[float, Point]:
    return {
        point["step"]: (number(point.get(axis)), number(point.get(loss)))
        for point in run.get("curve") or ()
        if point.get(loss) is not None
    }


def _curves(arm: _Arm, loss: str, axis: str) -> _Lines:
    """Averages both coordinates of the steps that every seed has: seeds differ in speed."""
    seeds = [points for run in arm.runs if (points := _curve(run, loss, axis))]
    common = [step for step in seeds[0] if all(step in points for points in seeds)] if seeds else []
    mean = [
        (_mean([points[step][0] for points in seeds]), _mean([points[step][1] for points in seeds]))
        for step in sorted(common)
    ]
    return _Lines(arm, [[points[step] for step in sorted(points)] for points in seeds], mean)


def _loss_figure(results: Results, axis: str, label: str, units: Sequence[_Unit]) -> str:
    name, title = f"loss-over-{axis}", f"Loss against {label}"
    lines, word = _recorded(results, "heldout_loss", axis), "held-out loss"
    if not lines:
        lines, word = _recorded(results, "train_loss", axis), "training loss"
    if not lines:
        return _words(name, title, "This run recorded no loss during training.")
    longest = max(x for line in lines for seed in line.seeds for x, _ in seed if math.isfinite(x))
    unit = next((unit for unit in units if longest >= unit.size), units[-1])
    lines = [_in_unit(line, unit) for line in lines]
    with _style():
        fig = _figure(_WIDTH, 3.5)
        headings = ["the whole run", "the second half, enlarged"]
        panels = 2 if max(len(line.mean) for line in lines) >= _POINTS_TO_ENLARGE else 1
        axes = fig.subplots(1, panels, squeeze=False)[0]
        for ax, heading in zip(axes, headings, strict=False):
            _draw_curves(ax, lines)
            ax.set_title(heading)
            ax.set_xlabel(f"{label} ({unit.name})" if unit.name else label)
        axes[0].set_ylabel(f"{word} (nats per token)")
        for ax in axes[1:]:
            _enlarge(ax, lines)
        _arm_legend(fig, lines)
        return _svg(fig, name, f"{title}, one line per arm: {_listing(_arms(results))}.")


def _recorded(results: Results, loss: str, axis: str) -> list[_Lines]:
    """Reads the curves of the arms that recorded a loss at a known place."""
    lines = [_curves(arm, loss, axis) for arm in _arms(results)]
    return [
        line for line in lines if any(math.isfinite(x + y) for seed in line.seeds for x, y in seed)
    ]


def _in_unit(lines: _Lines, unit: _Unit) -> _Lines:
    def scaled(points: Sequence[Point]) -> list[Point]:
        return [(x / unit.size, y) for x, y in points]

    return _Lines(lines.arm, [scaled(seed) for seed in lines.seeds], scaled(lines.mean))


def _draw_curves(ax: Axes, lines: Iterable[_Lines]) -> None:
    for line in lines:
        for seed in line.seeds if len(line.seeds) > 1 else ():
            ax.plot(*_split(seed), color=line.arm.color, linewidth=0.8, alpha=0.4)
        known = [place for place, (x, y) in enumerate(line.mean) if math.isfinite(x + y)]
        ax.plot(
            *_split(line.mean),
            color=line.arm.color,
            linewidth=2.0,
            marker=line.arm.marker,
            markersize=5.5,
            markevery=known[-1:],
        )


def _split(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _enlarge(ax: Axes, lines: Iterable[_Lines]) -> None:
    """Limits an axis to the second half of every line."""
    late = [
        point
        for line in lines
        for seed in line.seeds
        for point in seed[len(seed) // 2 :]
        if math.isfinite(point[0] + point[1])
    ]
    if not late:
        return
    for limit, values in zip((ax.set_xlim, ax.set_ylim), _split(late), strict=True):
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        limit(low - margin, high + margin)


def _arm_legend(fig: Figure, lines: Iterable[_Lines]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=line.arm.color, marker=line.arm.marker, linewidth=2.0, markersize=5.5)
        for line in lines
    ]
    _legend(fig, handles, [line.arm.label for line in lines])


def _legend(fig: Figure, handles: Sequence[Line2D], names: Sequence[str]) -> None:
    columns = min(len(names), _ARMS_PER_LINE)
    fig.legend(handles, names, loc="outside upper left", ncols=columns, fontsize=9)


def _category_lines(
    ax: Axes, lines: Sequence[_Lines], ticks: Sequence[str], keys: Sequence[float]
) -> None:
    """Draws lines over few places, side by side so that equal values stay visible."""
    places = {key: place for place, key in enumerate(keys)}
    for index, line in enumerate(lines):
        shift = 0.05 * (index - (len(lines) - 1) / 2.0)
        for seed in line.seeds if len(line.seeds) > 1 else ():
            xs, ys = _placed(seed, places, shift)
            ax.plot(xs, ys, color=line.arm.color, linewidth=0.8, alpha=0.45, marker=".")
        xs, ys = _placed(line.mean, places, shift)
        ax.plot(xs, ys, color=line.arm.color, linewidth=2.0, marker=line.arm.marker, markersize=5.5)
    ax.set_xticks(range(len(keys)), ticks)
    ax.set_xlim(-0.5, len(keys) - 0.5)
    ax.grid(visible=False, axis="x")


def _placed(
    points: Iterable[Point], places: Mapping[float, int], shift: float
) -> tuple[list[float], list[float]]:
    return _split([(places[x] + shift, y) for x, y in points if x in places])


def _heatmap(
    ax: Axes, arm: _Arm, rows: Sequence[tuple[int, int, int]], depths: Sequence[float]
) -> None:
    means = _cell_means(arm)
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


def _cell_means(arm: _Arm) -> dict[tuple[tuple[int, int, int], float], float]:
    values: dict[tuple[tuple[int, int, int], float], list[float]] = {}
    for run in arm.runs:
        for item in _recall(run):
            key = (_cell(item), item["depth"])
            values.setdefault(key, []).append(100.0 * number(item.get("accuracy")))
    return {key: _mean(found) for key, found in values.items()}


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


def _heat_legend(fig: Figure) -> None:
    from matplotlib.patches import Patch

    steps = (0, 25, 50, 75, 100)
    handles = [Patch(facecolor=HEAT, alpha=_shade(step)) for step in steps]
    names = [f"{step} %" for step in steps]
    title = "needles recalled"
    legend = fig.legend(handles, names, loc="outside upper left", ncols=len(steps), title=title)
    legend.set_alignment("left")


def _bars(ax: Axes, arms: Sequence[_Arm], shares: Sequence[Sequence[float]]) -> None:
    for place, (arm, values) in enumerate(zip(arms, shares, strict=True)):
        mean = _mean(values)
        if not math.isfinite(mean):
            ax.text(0.0, place, f" {MISSING}", va="center", color=MUTED)
            continue
        ax.barh(place, mean, height=0.62, color=arm.color, alpha=0.55)
        dots = values if len(values) > 1 else ()
        ax.plot(dots, [place] * len(dots), arm.marker, color=arm.color, markersize=3.6)
        end = max(mean, *values)
        ax.annotate(f"{mean:.1f} %", (end, place), (5, 0), textcoords="offset points", va="center")
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0.0, 1.22 * max(v for values in shares for v in values if math.isfinite(v)) or 1.0)
    ax.grid(visible=False)


def _arm_rows(ax: Axes, arms: Sequence[_Arm]) -> None:
    ax.set_yticks(range(len(arms)), [arm.label for arm in arms])
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.tick_params(axis="y", labelcolor=INK)


def _heights(measures: Sequence[Measure]) -> dict[Measure, float]:
    """Places the rows of a forest plot, with a gap between groups of measures."""
    heights: dict[Measure, float] = {}
    top = 0.0
    for index, measure in enumerate(measures):
        if index and measure.group != measures[index - 1].group:
            top += 0.6
        heights[measure] = top
        top += 1.0
    return heights


def _row_label(measure: Measure) -> str:
    unit = measure.scale.difference_unit
    return f"{measure.label} ({unit})" if unit else measure.label


def _forest(
    ax: Axes,
    arm: _Arm,
    rows: Sequence[MeasureRow],
    table: Sequence[MeasureRow],
    heights: Mapping[Measure, float],
) -> None:
    for height in list(heights.values())[::2]:
        ax.axhspan(height - 0.5, height + 0.5, color=BAND, linewidth=0)
    ax.axvline(0.0, color=MUTED, linewidth=1.0)
    for row in rows:
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


def _reach(row: MeasureRow) -> float:
    """How far from zero a row needs to be drawn."""
    values = [abs(value) for value in (row.raw_difference, *(row.raw_interval or ()))]
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _forest_row(ax: Axes, row: MeasureRow, height: float, reach: float) -> None:
    scale = row.measure.sign / reach
    color = VERDICT_COLORS.get(row.verdict, MUTED)
    decided = row.verdict in (BETTER, WORSE)
    if row.raw_interval is not None:
        ends = [scale * end for end in row.raw_interval]
        ax.plot(ends, [height, height], color=color, linewidth=2.2, solid_capstyle="butt")
    if math.isfinite(row.raw_difference):
        ax.plot(
            [scale * row.raw_difference],
            [height],
            _VERDICT_MARKERS.get(row.verdict, "o"),
            color=color,
            markerfacecolor=color if decided else BAND,
            markersize=7.0 if decided else 5.0,
        )
    text = ax.text(1.95, height, row.difference, ha="right", va="center_baseline", fontsize=8.5)
    text.set(in_layout=False, color=color if decided else MUTED)
    text.set_fontweight("bold" if decided else "normal")


def _verdict_legend(fig: Figure, verdicts: set[str]) -> None:
    from matplotlib.lines import Line2D

    shown = [verdict for verdict in VERDICT_COLORS if verdict in verdicts and verdict != MISSING]
    handles = [
        Line2D(
            [],
            [],
            color=VERDICT_COLORS[verdict],
            marker=_VERDICT_MARKERS[verdict],
            markerfacecolor=VERDICT_COLORS[verdict] if verdict in (BETTER, WORSE) else BAND,
            linewidth=2.2,
        )
        for verdict in shown
    ]
    _legend(fig, handles, shown)
