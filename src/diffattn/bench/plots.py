"""Draws the figures of benchmarks, each as SVG text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from diffattn.bench.spread import Spread
from diffattn.report.palette import ARM_COLORS, INK
from diffattn.report.plot_style import WIDTH, figure, style, svg, words

_LINES: Final = ("-", "-", "-", "-", "-", "-", "--", ":", "-.")


def ranges(name: str, title: str, panels: Mapping[str, Mapping[str, Spread]], label: str) -> str:
    """Draws spreads as points on lines, a panel for each group, beside a line at 1.

    Args:
        name: Of the figure in its page.
        title: For readers who do not see it.
        panels: Title -> label of a row -> its spread.
        label: Of the horizontal axis.
    """
    panels = {title: rows for title, rows in panels.items() if rows}
    if not panels:
        return words(name, title, "Nothing was measured.")
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    most = max(map(len, panels.values()))
    with style():
        fig = figure(WIDTH, lines * (1.2 + 0.22 * most))
        axes = fig.subplots(lines, columns, squeeze=False).flatten()
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        for ax, (panel, rows) in zip(axes, panels.items(), strict=False):
            forms = list(dict.fromkeys(row.split(",")[0] for row in rows))
            for place, (row, found) in enumerate(rows.items()):
                color = ARM_COLORS[1 + forms.index(row.split(",")[0]) % (len(ARM_COLORS) - 1)]
                ax.plot([found.low, found.high], [place, place], "-", color=color, linewidth=1.6)
                ax.plot([found.middle], [place], "o", color=color, markersize=4)
            ax.axvline(1, color=INK, linewidth=0.8)
            ax.set_title(textwrap.fill(panel, 48))
            ax.set_xlabel(label)
            ax.set_yticks(range(len(rows)), list(rows))
            ax.tick_params(axis="y", labelcolor=INK)
            ax.set_ylim(len(rows) - 0.5, -0.5)
        return svg(fig, name, f"{title}: {'; '.join(panels)}.")


def over_length(
    name: str,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
) -> str:
    """Draws lines over length, both axes logarithmic, a panel for each quantity.

    Args:
        name: Of the figure in its page.
        title: For readers who do not see it.
        panels: Quantity with its unit -> label of a line -> points (tokens, value).
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    if not labels:
        return words(name, title, "Nothing was measured.")
    with style():
        from matplotlib.ticker import LogLocator

        fig = figure(WIDTH, 3.8)
        axes = fig.subplots(1, len(panels), squeeze=False).flatten()
        for ax, (quantity, lines) in zip(axes, panels.items(), strict=True):
            for label, points in lines.items():
                index = labels.index(label)
                color = ARM_COLORS[index % len(ARM_COLORS)]
                line = _LINES[index % len(_LINES)]
                ax.plot(*zip(*points, strict=True), line, marker="o", markersize=3, color=color)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ticks = sorted({tokens for points in lines.values() for tokens, _ in points})
            ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
            ax.minorticks_off()
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_major_formatter("{x:,.6g}")
            ax.set_title(quantity)
            ax.set_xlabel("tokens")
        handles = [
            axes[0].plot([], [], _LINES[n % len(_LINES)], color=ARM_COLORS[n % len(ARM_COLORS)])[0]
            for n in range(len(labels))
        ]
        fig.legend(handles, labels, loc="outside lower center", ncols=6)
        return svg(fig, name, f"{title}: {', '.join(labels)}.")
