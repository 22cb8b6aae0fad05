"""Draws the figures of a comparison, each as SVG text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from diffattn.compare import plot_axes as draw
from diffattn.compare.plot_series import (
    DrawnArm,
    Lines,
    attention_lines,
    attention_shares,
    drawn_arms,
    known_places,
    lam_lines,
    loss_lines,
    recall_cells,
    recall_lines,
)
from diffattn.compare.rows import Measure, Results, measure_table
from diffattn.report.palette import INK, MUTED
from diffattn.report.plot_style import WIDTH, figure, style, svg, words

_ROW: Final = 0.27
_POINTS_TO_ENLARGE: Final = 8


def loss_over_tokens(results: Results) -> str:
    """Draws the loss against the tokens that were trained on.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    units = {"billions": 1e9, "millions": 1e6, "thousands": 1e3, "": 1.0}
    return _loss_figure(results, "tokens", "training tokens", units)


def loss_over_time(results: Results) -> str:
    """Draws the loss against the time that training took.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    units = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
    return _loss_figure(results, "seconds", "training time", units)


def recall_heatmaps(results: Results) -> str:
    """Draws the recall of every arm in every cell, as numbers on a common colour scale.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "recall-heatmaps", "Recall by cell, depth and length"
    arms = drawn_arms(results)
    means = [recall_cells(arm) for arm in arms]
    rows = sorted({row for of_arm in means for row, _ in of_arm})
    depths = sorted({depth for of_arm in means for _, depth in of_arm})
    if not rows:
        return words(name, title, "This run did not measure recall.")
    with style():
        lines = math.ceil(len(arms) / draw.ARMS_PER_LINE)
        blocks = len({row[0] for row in rows})
        height = lines * (_ROW * (len(rows) + 0.9 * blocks) + 0.55) + 0.75
        fig = figure(WIDTH, height)
        columns = min(len(arms), draw.ARMS_PER_LINE)
        grid = fig.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        axes = list(grid.flat)
        for ax, arm, of_arm in zip(axes, arms, means, strict=False):
            draw.heatmap(ax, arm, of_arm, rows, depths)
        for ax in axes[len(arms) :]:
            ax.set_axis_off()
        fig.supxlabel(
            "depth of the first needle asked for (0 % = start of the context)",
            color=MUTED,
            fontsize=9,
        )
        draw.heat_legend(fig)
        return svg(fig, name, f"{title}, one heat map per arm: {_listing(arms)}.")


def recall_by_length(results: Results) -> str:
    """Draws the mean recall of every arm against the length of the context.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "recall-by-length", "Recall by length of the context"
    lines = [recall_lines(arm) for arm in drawn_arms(results)]
    lengths = known_places(lines)
    if not lengths:
        return words(name, title, "This run did not measure recall.")
    with style():
        fig = figure(WIDTH, 3.3)
        ax = fig.subplots()
        draw.category_lines(ax, lines, {key: f"{key:,.0f}" for key in lengths})
        only = "; this run measured one length only" if len(lengths) == 1 else ""
        ax.set_xlabel(f"length of the context (tokens{only})")
        ax.set_ylabel("needles recalled (%)")
        ax.set_ylim(-3.0, 103.0)
        draw.arm_legend(fig, lines)
        return svg(fig, name, f"{title}, one line per arm: {_listing(drawn_arms(results))}.")


def attention_bars(results: Results) -> str:
    """Draws where the attention of every arm goes: the answer, the noise, the first token.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "attention-bars", "Attention on the answer and on noise"
    arms = drawn_arms(results)
    panels = [
        ("answer", "on the answer (more is better)"),
        ("noise", "on noise (less is better)"),
        ("first", "on the first token (neither)"),
    ]
    shares = {key: [attention_shares(arm, key) for arm in arms] for key, _ in panels}
    drawn = [
        (key, heading)
        for key, heading in panels
        if any(math.isfinite(share) for of_arm in shares[key] for share in of_arm)
    ]
    if not drawn:
        return words(name, title, "This run did not measure attention.")
    with style():
        fig = figure(WIDTH, 0.42 * len(arms) + 0.95)
        axes = fig.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
        for ax, (key, heading) in zip(axes, drawn, strict=True):
            draw.bars(ax, arms, shares[key])
            ax.set_title(heading)
            ax.set_xlabel("share of attention (%)")
        draw.arm_rows(axes[0], arms)
        return svg(fig, name, f"{title}, one bar per arm: {_listing(arms)}.")


def attention_by_depth(results: Results) -> str:
    """Draws the attention on the answer and on noise against the depth of the needle.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "attention-by-depth", "Attention by depth of the needle"
    arms = drawn_arms(results)
    panels = {
        "on the answer": [attention_lines(arm, "answer") for arm in arms],
        "on noise": [attention_lines(arm, "noise") for arm in arms],
    }
    drawn = {heading: lines for heading, lines in panels.items() if known_places(lines)}
    if not drawn:
        return words(name, title, "This run did not measure attention by depth.")
    with style():
        fig = figure(WIDTH, 3.1)
        axes = fig.subplots(1, len(drawn), squeeze=False)[0]
        for ax, (heading, lines) in zip(axes, drawn.items(), strict=True):
            ticks = {depth: f"{100.0 * depth:.0f} %" for depth in known_places(lines)}
            draw.category_lines(ax, lines, ticks)
            ax.set_title(heading)
            ax.set_xlabel("depth of the needle asked for")
            ax.set_ylabel("share of attention (%)")
            ax.set_ylim(bottom=0.0)
        draw.arm_legend(fig, next(iter(drawn.values())))
        return svg(fig, name, f"{title}, one line per arm: {_listing(arms)}.")


def lam_by_layer(results: Results) -> str:
    """Draws the learned λ of every differential arm against the layer.

    Args:
        results: The results of a comparison.

    Returns:
        The figure as SVG.
    """
    name, title = "lam-by-layer", "λ by layer"
    every = [lam_lines(arm) for arm in drawn_arms(results)]
    lines = [line for line in every if known_places([line])]
    if not lines:
        return words(name, title, "No arm of this run has a λ to show.")
    without = [line.arm.label for line in every if line not in lines]
    with style():
        fig = figure(WIDTH, 3.1)
        ax = fig.subplots()
        draw.category_lines(ax, lines, {layer: f"{layer}" for layer in known_places(lines)})
        ax.set_xlabel("layer" + (f" (no λ: {'; '.join(without)})" if without else ""))
        ax.set_ylabel("λ (no unit)")
        draw.arm_legend(fig, lines)
        return svg(fig, name, f"{title}: {_listing([line.arm for line in lines])}.")


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
        return words(name, title, "This run compares nothing: it holds no second arm.")
    measures = list(dict.fromkeys(row.measure for row in table))
    heights = _heights(measures)
    arms = [arm for arm in drawn_arms(results) if any(row.arm == arm.name for row in table)]
    with style():
        depth = max(heights.values()) + 1.0
        fig = figure(max(WIDTH, 2.6 * len(arms) + 2.6), _ROW * depth + 1.0)
        axes = fig.subplots(1, len(arms), squeeze=False, sharey=True)[0]
        for ax, arm in zip(axes, arms, strict=True):
            draw.forest(ax, arm, table, heights)
        axes[0].set_yticks(list(heights.values()), [_row_label(measure) for measure in measures])
        axes[0].tick_params(axis="y", labelcolor=INK)
        axes[0].set_ylim(depth - 0.4, -0.6)
        draw.verdict_legend(fig, {row.verdict for row in table})
        against = ", ".join(dict.fromkeys(row.against_label for row in table))
        return svg(fig, name, f"{title} against {against}, one column per arm: {_listing(arms)}.")


def _loss_figure(results: Results, axis: str, label: str, units: Mapping[str, float]) -> str:
    name, title = f"loss-over-{axis}", f"Loss against {label}"
    lines, word = _recorded(results, "heldout_loss", axis), "held-out loss"
    if not lines:
        lines, word = _recorded(results, "train_loss", axis), "training loss"
    if not lines:
        return words(name, title, "This run recorded no loss during training.")
    places = (x for line in lines for seed in line.seeds for x, _ in seed.values())
    longest = max(x for x in places if math.isfinite(x))
    unit = next((unit for unit, size in units.items() if longest >= size), list(units)[-1])
    lines = [line.divided(units[unit]) for line in lines]
    with style():
        fig = figure(WIDTH, 3.5)
        headings = ["the whole run", "the second half, enlarged"]
        panels = 2 if len(known_places(lines)) >= _POINTS_TO_ENLARGE else 1
        axes = fig.subplots(1, panels, squeeze=False)[0]
        for ax, heading in zip(axes, headings, strict=False):
            draw.curves(ax, lines)
            ax.set_title(heading)
            ax.set_xlabel(f"{label} ({unit})" if unit else label)
        axes[0].set_ylabel(f"{word} (nats per token)")
        for ax in axes[1:]:
            draw.enlarge(ax, lines)
        draw.arm_legend(fig, lines)
        return svg(fig, name, f"{title}, one line per arm: {_listing(drawn_arms(results))}.")


def _recorded(results: Results, loss: str, axis: str) -> list[Lines]:
    """Reads the curves of the arms that recorded a loss at a known place."""
    lines = [loss_lines(arm, loss, axis) for arm in drawn_arms(results)]
    return [line for line in lines if known_places([line])]


def _listing(arms: Iterable[DrawnArm]) -> str:
    return "; ".join(arm.label for arm in arms)


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
