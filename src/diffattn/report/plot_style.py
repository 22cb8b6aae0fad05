"""Gives every figure its look as SVG that suits light pages as well as dark ones."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final, Literal

from diffattn.errors import needs_extra
from diffattn.report.palette import GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS: Final = 'class="words"'
WIDTH: Final = 10.4

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


@contextmanager
def style() -> Iterator[None]:
    """Sets the common look; where matplotlib is missing, says what to install."""
    with needs_extra("a figure", "plot"):
        import matplotlib
    with matplotlib.rc_context(_RC):
        yield


def figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """Starts a figure of a size in inches, outside of any window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def svg(fig: Figure, name: str, description: str) -> str:
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


def words(name: str, title: str, sentence: str) -> str:
    """Says in words what a figure would have shown."""
    lines = textwrap.wrap(sentence, 120)
    with style():
        fig = figure(WIDTH, 0.3 + 0.2 * len(lines), layout=None)
        fig.text(0.01, 0.5, "\n".join(lines), va="center", color=MUTED, fontsize=10)
        return svg(fig, name, f"{title}: {sentence}").replace("<svg", f"<svg {WORDS}", 1)
