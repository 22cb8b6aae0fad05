"""Draws what suites measure, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diffattn.report.palette import ARM_COLORS, INK
from diffattn.report.plot_style import WIDTH, figure, style, svg, words


def lines(
    name: str,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    across: str,
    up: str,
    logarithmic: bool = True,
) -> str:
    """Draws a line for each model, a panel for each quantity.

    Args:
        name: Of the figure in its page.
        title: For readers who do not see it.
        panels: Title -> model -> points.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        logarithmic: Whether the horizontal axis is.
    """
    models = list(dict.fromkeys(model for found in panels.values() for model in found))
    with style():
        fig = figure(WIDTH, 3.4)
        axes = fig.subplots(1, len(panels), squeeze=False).flatten()
        for ax, (panel, found) in zip(axes, panels.items(), strict=True):
            for model, points in found.items():
                color = ARM_COLORS[models.index(model) % len(ARM_COLORS)]
                ax.plot(*zip(*points, strict=True), "-o", markersize=3, color=color)
            if logarithmic:
                ax.set_xscale("log", base=2)
            ticks = sorted({x for points in found.values() for x, _ in points})
            ax.set_xticks(ticks, [f"{tick:,.6g}" for tick in ticks], rotation=45)
            ax.minorticks_off()
            ax.set_title(panel)
            ax.set_xlabel(across)
            ax.set_ylabel(up)
        handles = [
            axes[0].plot([], [], "-o", markersize=3, color=ARM_COLORS[n % len(ARM_COLORS)])[0]
            for n in range(len(models))
        ]
        fig.legend(handles, models, loc="outside lower center", ncols=4)
        return svg(fig, name, f"{title}: {', '.join(models)}.")


def effects(name: str, title: str, rows: Mapping[str, tuple[float, float, float]]) -> str:
    """Draws effects with their intervals, in units of the smallest difference worth naming.

    Args:
        name: Of the figure in its page.
        title: For readers who do not see it.
        rows: Label -> effect and both ends of its interval, better to the right.
    """
    if not rows:
        return words(name, title, "No two models were compared.")
    with style():
        fig = figure(WIDTH, 1.0 + 0.3 * len(rows))
        ax = fig.subplots()
        for place, (middle, low, high) in enumerate(rows.values()):
            ax.plot([low, high], [place, place], "-", color=ARM_COLORS[1], linewidth=1.6)
            ax.plot([middle], [place], "o", color=ARM_COLORS[1], markersize=4)
        ax.axvline(0, color=INK, linewidth=0.8)
        ax.axvspan(-1, 1, color=INK, alpha=0.08, linewidth=0)
        ax.set_xscale("symlog", linthresh=1)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.tick_params(axis="y", labelcolor=INK)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlabel("difference over the margin; right of 0 is better than the first model")
        return svg(fig, name, f"{title}: {'; '.join(rows)}.")
