"""Names the colours of a report, each with its counterpart on dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from diffattn.report.verdicts import BETTER, NO_DIFFERENCE, WORSE

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


def css_name(verdict: str) -> str:
    """Names a verdict in the style sheet, where no space can stand."""
    return verdict.replace(" ", "-")


def light_theme() -> str:
    """Declares the colours of the page as variables of its style sheet."""
    return "; ".join(f"--{name}: {color}" for name, color in _theme())


def dark_theme() -> str:
    """Declares the same variables for dark pages."""
    return "; ".join(f"--{name}: {DARK_COLORS[color]}" for name, color in _theme())


def dark_figures() -> str:
    """Recolours the figures on dark pages: SVG names its colours in style attributes."""
    rules = [
        f'[style*="{role}: {light}"] {{ {role}: {dark} !important }}'
        for light, dark in DARK_COLORS.items()
        for role in ("fill", "stroke")
    ]
    return "\n    ".join(rules)


def _theme() -> Iterator[tuple[str, str]]:
    yield from (("ink", INK), ("muted", MUTED), ("line", GRID), ("band", BAND), ("accent", HEAT))
    yield from ((f"arm-{index}", color) for index, color in enumerate(ARM_COLORS))
    yield from ((css_name(verdict), color) for verdict, color in VERDICT_COLORS.items())
