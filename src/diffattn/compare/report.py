"""Writes the results of a comparison as one self-contained page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diffattn.compare import plots
from diffattn.compare.answer import answer
from diffattn.compare.rows import (
    Measure,
    MeasureRow,
    Results,
    arm_table,
    labels,
    level_text,
    measure_table,
)
from diffattn.report.numbers import (
    MISSING,
    Scale,
    bytes_text,
    count_text,
    duration_text,
    plural,
    scale_of,
)
from diffattn.report.page import render_page
from diffattn.report.palette import ARM_COLORS
from diffattn.report.plot_style import WORDS
from diffattn.report.verdicts import VERDICTS
from diffattn.whole_file import write_text


@dataclass(frozen=True)
class _Figure:
    """One figure of the page: an anchor, a heading, the picture and what it shows, if anything."""

    anchor: str
    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class _Run:
    """One training run, as text."""

    arm: str
    seed: str
    tokens: str
    start: str
    loss: str
    duration: str
    speed: str
    memory: str
    warnings: Sequence[str]


_ATTENTION_DEFINITION: Final = (
    "Share of absolute attention weight of the query token (the last prompt token that asks for "
    "a needle), averaged over heads, layers and items; answer = the queried needle, noise = the "
    "other context tokens; the first token (BOS) and the question itself are neither."
)
_FIGURES: Final[Sequence[tuple[str, str, Callable[[Results], str], str]]] = (
    (
        "differences",
        "Every difference at a glance",
        plots.differences,
        "One row per measure, one column per arm. The mark is the difference, the bar its "
        "interval; to the right of the line is better. A bar that crosses the line is no "
        "difference. Every measure has its own scale, shared by the arms of a row; the number is "
        "the difference in the unit named on the left.",
    ),
    (
        "loss-over-tokens",
        "Loss for the same amount of text",
        plots.loss_over_tokens,
        "Lower is better. Thin lines are single seeds, thick lines their mean.",
    ),
    (
        "loss-over-time",
        "Loss for the same amount of time",
        plots.loss_over_time,
        "The same runs against the time they took on this machine. Lower is better. Thin lines "
        "are single seeds, thick lines their mean.",
    ),
    (
        "recall-heatmaps",
        "Recall in every cell",
        plots.recall_heatmaps,
        "Percent of asked needles that were answered correctly, mean over seeds. N needles are "
        "hidden in the context and R of them are asked for.",
    ),
    (
        "recall-by-length",
        "Recall as the context grows",
        plots.recall_by_length,
        "Mean over all cells of a length. Higher is better. Thin lines are single seeds, thick "
        "lines their mean.",
    ),
    (
        "attention-bars",
        "Where attention goes",
        plots.attention_bars,
        f"{_ATTENTION_DEFINITION} Bars are means, dots are single seeds.",
    ),
    (
        "attention-by-depth",
        "Where attention goes, by depth of the needle",
        plots.attention_by_depth,
        "The same shares for needles near the start (0 %) to the end (100 %) of the context. "
        "Thin lines are single seeds, thick lines their mean.",
    ),
    (
        "lam-by-layer",
        "How much is subtracted",
        plots.lam_by_layer,
        "λ is the weight of the second attention map, which differential attention subtracts "
        "from the first. Thin lines are single seeds, thick lines their mean.",
    ),
)


def render_report(results: dict[str, Any]) -> str:
    """Renders the page.

    Args:
        results: The results of a comparison.

    Returns:
        HTML that needs no other file, no network and no scripts; the same results give the
        same text.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    return render_page("diffattn.compare", "report.html.jinja", _context(results))


def write_report(results: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the page to a file, whole or not at all.

    Args:
        results: The results of a comparison.
        path: Where the page goes; an existing file is replaced.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    write_text(Path(path), render_report(results))


def _context(results: Results) -> dict[str, Any]:
    arms = arm_table(results)
    return {
        "title": results.get("title") or "Comparison",
        "command": results.get("command") or "",
        "subtitle": _subtitle(results),
        "answer": answer(results),
        "verdicts": VERDICTS,
        "arms": arms,
        "reference": arms[0].label if arms else "",
        "colors": _arm_colors(results),
        "groups": _groups(results),
        "level": level_text(results),
        "spread": _spread(results),
        "figures": _figures(results),
        "attention_definition": _ATTENTION_DEFINITION,
        "runs": _runs(results),
        "data": _data(results),
        "machine": _machine(results),
        "config": _flat(results.get("config") or {}),
        "notes": [str(note) for note in results.get("notes") or ()],
        "missing": MISSING,
    }


def _subtitle(results: Results) -> str:
    version = results.get("version")
    parts = (
        f"preset {results['preset']}" if results.get("preset") else "",
        plural(len(results.get("arms") or ()), "arm"),
        plural(len(results.get("seeds") or ()), "seed"),
        str(results.get("created") or ""),
        f"diffattn {version}" if version else "",
    )
    return " · ".join(part for part in parts if part)


def _spread(results: Results) -> str:
    seeds = plural(len(results.get("seeds") or ()), "seed")
    if seeds == "1 seed":
        return "Values of one seed, so nothing is known about their spread."
    return f"Means over {seeds}, ± one standard deviation between seeds."


def _figures(results: Results) -> list[_Figure]:
    drawn = ((anchor, title, draw(results), text) for anchor, title, draw, text in _FIGURES)
    return [
        _Figure(anchor, title, svg, "" if WORDS in svg else text)
        for anchor, title, svg, text in drawn
    ]


def _groups(results: Results) -> dict[Measure, list[MeasureRow]]:
    groups: dict[Measure, list[MeasureRow]] = {}
    for row in measure_table(results):
        groups.setdefault(row.measure, []).append(row)
    return groups


def _runs(results: Results) -> list[_Run]:
    names = labels(results)
    loss, speed = scale_of("nats/token"), scale_of("tokens/s")
    return [
        _Run(
            arm=names[arm["name"]],
            seed=str(run.get("seed", MISSING)),
            tokens=count_text(arm.get("tokens")),
            start="own" if arm.get("own_start") else "shared",
            loss=loss.value(run.get("heldout_loss")),
            duration=duration_text(run.get("train_seconds")),
            speed=speed.value(run.get("tokens_per_second")),
            memory=bytes_text(run.get("peak_memory_bytes")),
            warnings=[str(warning) for warning in run.get("warnings") or ()],
        )
        for arm in results.get("arms") or ()
        for run in arm.get("runs") or ()
    ]


def _data(results: Results) -> list[tuple[str, str]]:
    data, whole = results.get("data") or {}, Scale(1.0, 0)
    return [
        ("source", str(data.get("source") or MISSING)),
        ("documents, training", _of_given(data, "documents_train")),
        ("documents, held out", _of_given(data, "documents_heldout")),
        ("tokens, training", whole.value(data.get("tokens_train"))),
        ("tokens, held out", whole.value(data.get("tokens_heldout"))),
        ("vocabulary", whole.value(data.get("vocab_size"))),
        ("bytes per token", Scale(1.0, 2).value(data.get("bytes_per_token"))),
        ("SHA-256", str(data.get("sha256") or MISSING)),
    ]


def _of_given(data: Mapping[str, Any], name: str) -> str:
    """Says how many of the given documents were read, such as '63 of 210'."""
    whole = Scale(1.0, 0)
    used, given = whole.value(data.get(name)), whole.value(data.get(f"{name}_given"))
    return used if given == MISSING else f"{used} of {given}"


def _machine(results: Results) -> list[tuple[str, str]]:
    machine: Mapping[str, Any] = results.get("machine") or {}
    rows = [(str(key).replace("_", " "), _plain(value)) for key, value in machine.items()]
    rows.append(("peak memory, all runs", bytes_text(results.get("peak_memory_bytes"))))
    rows.append(("time, whole comparison", duration_text(results.get("wall_seconds"))))
    return rows


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            rows.extend(_flat(value, f"{prefix}{key}."))
        else:
            rows.append((f"{prefix}{key}", _plain(value)))
    return rows


def _plain(value: object) -> str:
    if value is None:
        return MISSING
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _arm_colors(results: Results) -> dict[str, str]:
    names = labels(results)
    return {name: f"var(--arm-{i % len(ARM_COLORS)})" for i, name in enumerate(names)}
