"""Writes the results of a comparison as one self-contained page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diffattn.compare import plots, table
from diffattn.compare.table import MISSING, Measure, MeasureRow, Results
from diffattn.errors import needs_extra

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class _Figure:
    """One figure of the page: an anchor, a heading, the picture and what it shows, if anything."""

    anchor: str
    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class _Group:
    """All comparisons of one measure."""

    measure: Measure
    rows: Sequence[MeasureRow]


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
        f"{table.ATTENTION_DEFINITION} Bars are means, dots are single seeds.",
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
    return _template().render(_context(results))


def write_report(results: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the page to a file, whole or not at all.

    Args:
        results: The results of a comparison.
        path: Where the page goes; an existing file is replaced.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    target = Path(path)
    html = render_report(results)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html, encoding="utf-8", newline="\n")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _template() -> Template:
    with needs_extra("the report", "plot"):
        from jinja2 import Environment, StrictUndefined
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    source = resources.files("diffattn.compare").joinpath("report.html.jinja")
    return environment.from_string(source.read_text(encoding="utf-8"))


def _context(results: Results) -> dict[str, Any]:
    arms = table.arm_table(results)
    return {
        "title": results.get("title") or "Comparison",
        "command": results.get("command") or "",
        "subtitle": _subtitle(results),
        "answer": table.answer(results),
        "verdicts": table.VERDICTS,
        "arms": arms,
        "reference": arms[0].label if arms else "",
        "colors": _arm_colors(results),
        "groups": _groups(results),
        "level": table.level_text(results),
        "spread": _spread(results),
        "figures": _figures(results),
        "attention_definition": table.ATTENTION_DEFINITION,
        "runs": _runs(results),
        "data": _data(results),
        "machine": _machine(results),
        "config": _flat(results.get("config") or {}),
        "notes": [str(note) for note in results.get("notes") or ()],
        "missing": MISSING,
        "light_theme": _light_theme(),
        "dark_theme": _dark_theme(),
        "dark_figures": _dark_figures(),
    }


def _subtitle(results: Results) -> str:
    version = results.get("version")
    parts = (
        f"preset {results['preset']}" if results.get("preset") else "",
        table.plural(len(results.get("arms") or ()), "arm"),
        table.plural(len(results.get("seeds") or ()), "seed"),
        str(results.get("created") or ""),
        f"diffattn {version}" if version else "",
    )
    return " · ".join(part for part in parts if part)


def _spread(results: Results) -> str:
    seeds = table.plural(len(results.get("seeds") or ()), "seed")
    if seeds == "1 seed":
        return "Values of one seed, so nothing is known about their spread."
    return f"Means over {seeds}, ± one standard deviation between seeds."


def _figures(results: Results) -> list[_Figure]:
    drawn = [_Figure(anchor, title, draw(results), text) for anchor, title, draw, text in _FIGURES]
    return [replace(f, caption="") if plots.WORDS in f.svg else f for f in drawn]


def _groups(results: Results) -> list[_Group]:
    groups: dict[Measure, list[MeasureRow]] = {}
    for row in table.measure_table(results):
        groups.setdefault(row.measure, []).append(row)
    return [_Group(measure, rows) for measure, rows in groups.items()]


def _runs(results: Results) -> list[_Run]:
    names = table.labels(results)
    loss = Measure("heldout_loss", "", "", "lower").scale
    speed = Measure("tokens_per_second", "", "", "higher").scale
    return [
        _Run(
            arm=names[arm["name"]],
            seed=str(run.get("seed", MISSING)),
            tokens=table.count_text(arm.get("tokens")),
            start="own" if arm.get("own_start") else "shared",
            loss=loss.value(table.number(run.get("heldout_loss"))),
            duration=_duration(run.get("train_seconds")),
            speed=speed.value(table.number(run.get("tokens_per_second"))),
            memory=_bytes(run.get("peak_memory_bytes")),
            warnings=[str(warning) for warning in run.get("warnings") or ()],
        )
        for arm in results.get("arms") or ()
        for run in arm.get("runs") or ()
    ]


def _data(results: Results) -> list[tuple[str, str]]:
    data = results.get("data") or {}
    return [
        ("source", str(data.get("source") or MISSING)),
        ("documents, training", _integer(data.get("documents_train"))),
        ("documents, held out", _integer(data.get("documents_heldout"))),
        ("tokens, training", _integer(data.get("tokens_train"))),
        ("tokens, held out", _integer(data.get("tokens_heldout"))),
        ("vocabulary", _integer(data.get("vocab_size"))),
        ("bytes per token", _decimal(data.get("bytes_per_token"))),
        ("SHA-256", str(data.get("sha256") or MISSING)),
    ]


def _machine(results: Results) -> list[tuple[str, str]]:
    machine: Mapping[str, Any] = results.get("machine") or {}
    rows = [(str(key).replace("_", " "), _plain(value)) for key, value in machine.items()]
    rows.append(("peak memory, all runs", _bytes(results.get("peak_memory_bytes"))))
    rows.append(("time, whole comparison", _duration(results.get("wall_seconds"))))
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


def _integer(value: object) -> str:
    amount = table.number(value)
    return f"{amount:,.0f}" if amount == amount else MISSING


def _decimal(value: object) -> str:
    amount = table.number(value)
    return f"{amount:.2f}" if amount == amount else MISSING


def _bytes(value: object) -> str:
    amount = table.number(value)
    if amount != amount:
        return MISSING
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount:.0f} B"


def _duration(value: object) -> str:
    seconds = table.number(value)
    if seconds != seconds:
        return MISSING
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _arm_colors(results: Results) -> dict[str, str]:
    names = table.labels(results)
    return {name: f"var(--arm-{i % len(plots.ARM_COLORS)})" for i, name in enumerate(names)}


def _theme_names() -> Iterable[tuple[str, str]]:
    yield from (("ink", plots.INK), ("muted", plots.MUTED), ("line", plots.GRID))
    yield from (("band", plots.BAND), ("accent", plots.HEAT))
    yield from ((f"arm-{index}", color) for index, color in enumerate(plots.ARM_COLORS))
    yield from (
        (verdict.replace(" ", "-").replace("/", ""), color)
        for verdict, color in plots.VERDICT_COLORS.items()
    )


def _light_theme() -> str:
    return "; ".join(f"--{name}: {color}" for name, color in _theme_names())


def _dark_theme() -> str:
    colors = [(name, plots.DARK_COLORS[color]) for name, color in _theme_names()]
    return "; ".join(f"--{name}: {color}" for name, color in colors)


def _dark_figures() -> str:
    """Recolours the figures on dark pages: SVG names its colours in style attributes."""
    rules = [
        f'[style*="{role}: {light}"] {{ {role}: {dark} !important }}'
        for light, dark in plots.DARK_COLORS.items()
        for role in ("fill", "stroke")
    ]
    return "\n    ".join(rules)
