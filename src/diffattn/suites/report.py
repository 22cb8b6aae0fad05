"""Writes cards, tables and pictures as one self-contained page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffattn.machine import machine
from diffattn.report.numbers import MISSING, scale_of
from diffattn.report.page import render_page
from diffattn.report.tables import Figure, Table
from diffattn.suites import plots
from diffattn.suites.cards import Card
from diffattn.suites.suite import Measured, suite_named
from diffattn.whole_file import write_text


def claims_table(cards: Mapping[str, Card]) -> Table:
    """A row for each comparison; of one model alone, its value."""
    rows = []
    for card in cards.values():
        scale = scale_of(card["measure"]["unit"])
        for found in card["comparisons"] or [{**card, "model": card["models"][0]["name"]}]:
            effect = found["effect"]
            value = scale.value if not card["comparisons"] else scale.difference
            interval = found["interval"]
            rows.append(
                (
                    card["claim"],
                    found["model"] + (f" against {found['against']}" if "against" in found else ""),
                    MISSING if effect is None else value(effect),
                    scale.interval(None if interval is None else tuple(interval)),
                    card["measure"]["unit"],
                    found["verdict"],
                    card["paper"] or "",
                )
            )
    return Table(
        "Claims",
        ("claim", "models", "effect", "95 % interval", "unit", "verdict", "the paper's"),
        rows,
        tuple(dict.fromkeys(c["reason"] for c in cards.values() if c["reason"])),
    )


def write_report(
    cards: Mapping[str, Card],
    settings: Mapping[str, Any],
    measured: Mapping[str, Measured],
    headers: Mapping[str, list[dict[str, Any]]],
    *,
    command: str,
    path: Path,
) -> None:
    """Writes the page, whole or not at all.

    Args:
        cards: By name.
        settings: Of each suite.
        measured: Records of each suite.
        headers: Of each model's records.
        command: With which it was made.
        path: Of the page.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    context = {
        "title": "Claims on these models",
        "subtitle": ", ".join(headers),
        "command": command,
        "claims": claims_table(cards),
        "effects": Figure(
            "Differences beside the smallest ones worth naming",
            plots.effects("effects", "Effects of all claims", _effects(cards)),
            "Points are differences to the first model, lines their 95 % intervals, in units of "
            "the smallest difference worth naming; inside the grey band there is no difference. "
            "Each interval holds by itself, not jointly.",
        ),
        "suites": [
            {
                "name": name,
                "tables": suite_named(name).tables(values, measured[name]),
                "figures": suite_named(name).figures(values, measured[name]),
                "settings": [(field, str(v)) for field, v in vars(values).items()],
            }
            for name, values in settings.items()
        ],
        "prompts": [
            (
                f"{subject}, {header['suite']}",
                f"{header['first_ids']} ... {header['last_ids']}, items {header['items'][:12]}, "
                f"weights {header['weights'][:12]}, {header['dtype']}, {header['model']}",
            )
            for subject, found in headers.items()
            for header in found
        ],
        "machine": [(name.replace("_", " "), str(value)) for name, value in machine().items()],
    }
    write_text(path, render_page("diffattn.suites", "eval.html.jinja", context))


def _effects(cards: Mapping[str, Card]) -> dict[str, tuple[float, float, float]]:
    rows = {}
    for name, card in cards.items():
        unit = card["measure"]["margin"] * (1 if card["measure"]["better"] == "higher" else -1)
        for found in card["comparisons"]:
            if found["interval"] is not None and unit:
                low, high = sorted(end / unit for end in found["interval"])
                rows[f"{name}: {found['model']}"] = (found["effect"] / unit, low, high)
    return rows
