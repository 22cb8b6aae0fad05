"""Writes the results of a study as one self-contained page."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from diffattn.report.numbers import count_text, duration_text, plural, scale_of
from diffattn.report.page import render_page
from diffattn.study import plots
from diffattn.study.arms import arm_named
from diffattn.study.claim import (
    READING,
    TITLE,
    caveats,
    circumstances,
    row_of,
    rows,
    sentence,
)
from diffattn.study.probes import MEASURES
from diffattn.whole_file import write_text

Results = dict[str, Any]

_FIGURES: Final[Sequence[tuple[str, str, Callable[[Results], str], str]]] = (
    (
        "differences",
        "Every arm against attention-only tuning",
        plots.differences,
        "Improvements over attention-only tuning: right of the line is better, so losses stand "
        "with the opposite sign of the table's. Solid intervals hold over seeds and items; dotted "
        "ones over the items of one seed alone, and say nothing of other seeds. The grey band, "
        "where it is wide enough to be seen, is the noise floor.",
    ),
    (
        "forgetting",
        "What is learned and what is forgotten",
        plots.learning_and_forgetting,
        "Against the base model, which is at the cross: further left learned more of the text, "
        "further up forgot more of other text.",
    ),
    (
        "trajectories",
        "λ and the size of the correction",
        plots.trajectories,
        "One line per layer, deeper layers darker, first seed. λ of DEX rises to a quarter of "
        "λ_init at half of T and is what was learned from T on. |Δ| / |O| is the norm of what is "
        "subtracted from the selected heads over the norm of these heads.",
    ),
    (
        "heads",
        "Redundancy of heads, before and after",
        plots.heads,
        "Change against the base model; means over all pairs of heads of a layer, first seed. "
        "Distance is 1 - cosine of two heads' attention maps, CKA the likeness of their outputs "
        "(0 none, 1 equal up to rotation): high distance and low CKA mean that heads differ.",
    ),
)


def render_report(results: Results) -> str:
    """Renders the page.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    settings = results["settings"]
    context = {
        "title": TITLE,
        "subtitle": f"{settings['model']} · {plural(results['runs_done'], 'run')} · diffattn "
        f"{results['version']}",
        "sentence": sentence(results),
        "caveats": caveats(results),
        "reading": READING,
        "claim": rows(results),
        "measures": [f"{measure.title}" for measure in MEASURES],
        "units": [measure.unit for measure in MEASURES],
        "arms": _arms(results),
        "left_out": [(arm_named(n).title, reason) for n, reason in results["left_out"].items()],
        "figures": [
            {"anchor": anchor, "title": title, "svg": draw(results), "caption": caption}
            for anchor, title, draw, caption in _FIGURES
        ],
        "trials": _trials(results),
        "circumstances": circumstances(results),
        "machines": [
            [(name.replace("_", " "), _plain(value)) for name, value in machine.items()]
            for machine in results["machines"]
        ],
        "seconds": duration_text(results["seconds"]),
        "settings": [(name, _plain(value)) for name, value in settings.items()],
    }
    return render_page("diffattn.study", "study.html.jinja", context)


def write_report(results: Results, path: str | os.PathLike[str]) -> None:
    """Writes the page to a file, whole or not at all.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    write_text(Path(path), render_report(results))


def _arms(results: Results) -> list[dict[str, Any]]:
    """Rows of the table, the control first."""
    listed = sorted(results["arms"], key=lambda arm: arm["name"] != "attention")
    return [
        {
            "title": arm["title"],
            "about": arm["about"],
            "trained": count_text(arm["trained"]),
            "rate": "none" if arm["rate"] is None else f"{arm['rate']:.1e}",
            "seeds": plural(len(arm["seeds"]), "seed"),
            "diverged": arm["diverged"],
            "cells": [_cell(arm, measure, results) for measure in MEASURES],
        }
        for arm in listed
    ]


def _cell(arm: dict[str, Any], measure: Any, results: Results) -> dict[str, str]:
    value = scale_of(measure.unit).bare(arm["means"][measure.name])
    found = results["differences"].get(arm["name"], {}).get(measure.name)
    if found is None:
        return {"value": value, "difference": "", "interval": "", "verdict": "one seed"}
    text = row_of(measure, found, None)
    return {"value": value, **{key: text[key] for key in ("difference", "interval", "verdict")}}


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)


def _trials(results: Results) -> list[dict[str, str]]:
    best = {arm["name"]: arm["rate"] for arm in results["arms"]}
    return [
        {
            "arm": arm_named(trial["arm"]).title,
            "rate": f"{trial['rate']:.1e}",
            "loss": "diverged" if trial["loss"] is None else f"{trial['loss']:.4f}",
            "chosen": "chosen" if trial["rate"] == best.get(trial["arm"]) else "",
        }
        for trial in results["trials"]
    ]
