"""Prints a comparison as plain text for a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diffattn.compare.answer import answer
from diffattn.compare.numbers import MINUS, SPACE, plural
from diffattn.compare.rows import (
    DECIDED,
    HEADLINES,
    MeasureRow,
    Results,
    arm_table,
    level_text,
    measure_table,
)

_WIDTH: Final = 100


@dataclass(frozen=True)
class _Column:
    """One column of a plain-text table: its title, its largest width and its alignment."""

    title: str
    width: int
    align: str = "<"


def terminal_table(results: Results) -> str:
    """Prints the comparison as plain text of at most 100 columns.

    Args:
        results: The results of a comparison.

    Returns:
        The answer, the table of arms and the table of the main differences.
    """
    summary = answer(results)
    blocks = [_wrap([str(results.get("title") or "Comparison")]), _arms(results)]
    differences = _differences(results)
    if differences:
        blocks.append(differences)
    sentences = [f"- {arm.label}{arm.text}" for arm in summary.arms]
    blocks.append(_wrap([summary.lead, *sentences]))
    if summary.explanations:
        blocks.append(_wrap(summary.explanations))
    notes = [f"Note: {note}" for note in results.get("notes") or ()]
    if notes:
        blocks.append(_wrap(notes))
    return "\n\n".join("\n".join(_plain(line) for line in block) for block in blocks) + "\n"


def _arms(results: Results) -> list[str]:
    columns = (
        _Column("arm", 23),
        _Column("params", 7, ">"),
        _Column("FLOPs/tok", 9, ">"),
        _Column("tokens/s", 9, ">"),
        _Column("held-out loss", 15, ">"),
        _Column("recall", 12, ">"),
        _Column("answer", 7, ">"),
        _Column("noise", 7, ">"),
    )
    rows = [
        (
            row.label,
            row.parameters,
            row.flops,
            row.values["tokens_per_second"].mean,
            row.values["heldout_loss"].text,
            row.values["recall"].text,
            row.values["attention_answer"].mean,
            row.values["attention_noise"].mean,
        )
        for row in arm_table(results)
    ]
    return _grid(columns, rows)


def _differences(results: Results) -> list[str]:
    table = measure_table(results)
    shown = [row for row in table if row.measure.name in HEADLINES or row.verdict in DECIDED]
    if not shown:
        return []
    columns = (
        _Column("measure, arm", 34),
        _Column("difference", 12, ">"),
        _Column(f"joint {level_text(results)} interval", 24, ">"),
        _Column("verdict", 13),
    )
    grid = _grid(columns, [_difference_cells(row) for row in shown])
    lines, below = grid[:2], iter(grid[2:])
    for measure, rows in itertools.groupby(shown, key=lambda row: row.measure):
        unit = f"{measure.scale.difference_unit}, " if measure.scale.difference_unit else ""
        lines.extend(_wrap([f"{measure.label} ({unit}{measure.better} is better)"]))
        lines.extend(next(below) for _ in rows)
    hidden = len(table) - len(shown)
    if hidden:
        lines.append(f"and {plural(hidden, 'comparison')} by cell or depth that decided nothing")
    return lines


def _difference_cells(row: MeasureRow) -> Sequence[str]:
    label = row.arm_label if len(row.arm_label) <= 32 else f"{row.arm_label[:29]}..."
    return f"  {label}", row.difference, row.interval, row.verdict


def _grid(columns: Sequence[_Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lays cells out in columns as narrow as they can be; long cells wrap."""
    fitted = [
        replace(column, width=min(column.width, max(len(cell) for cell in (column.title, *cells))))
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    lines = _grid_row([column.title for column in fitted], fitted)
    lines.append("  ".join("-" * column.width for column in fitted))
    for row in rows:
        lines.extend(_grid_row(row, fitted))
    return lines


def _grid_row(row: Sequence[str], columns: Sequence[_Column]) -> list[str]:
    cells = [
        textwrap.wrap(text, column.width) or [""] for text, column in zip(row, columns, strict=True)
    ]
    lines: list[str] = []
    for index in range(max(len(cell) for cell in cells)):
        parts = (cell[index] if index < len(cell) else "" for cell in cells)
        padded = (f"{part:{c.align}{c.width}}" for part, c in zip(parts, columns, strict=True))
        lines.append("  ".join(padded).rstrip())
    return lines


def _wrap(paragraphs: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in paragraphs:
        indent = "  " if text.startswith("- ") else ""
        lines.extend(textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False))
    return lines


def _plain(line: str) -> str:
    """Keeps what every terminal prints: plain spaces and signs, no control characters."""
    for fancy, plain in ((SPACE, " "), (MINUS, "-"), ("“", '"'), ("”", '"')):
        line = line.replace(fancy, plain)
    return "".join(char if char.isprintable() else "?" for char in line)
