"""Tables and paragraphs of plain text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diffattn.report.numbers import MINUS, SPACE

WIDTH: Final = 100


@dataclass(frozen=True)
class Column:
    """One column of a plain-text table: its title, its largest width and its alignment."""

    title: str
    width: int
    align: str = "<"


def grid(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
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


def _grid_row(row: Sequence[str], columns: Sequence[Column]) -> list[str]:
    cells = [
        textwrap.wrap(text, column.width) or [""] for text, column in zip(row, columns, strict=True)
    ]
    lines: list[str] = []
    for index in range(max(len(cell) for cell in cells)):
        parts = (cell[index] if index < len(cell) else "" for cell in cells)
        padded = (f"{part:{c.align}{c.width}}" for part, c in zip(parts, columns, strict=True))
        lines.append("  ".join(padded).rstrip())
    return lines


def wrap(paragraphs: Iterable[str]) -> list[str]:
    """Breaks paragraphs into lines; the lines of an item that starts with a dash are indented."""
    lines: list[str] = []
    for text in paragraphs:
        indent = "  " if text.startswith("- ") else ""
        lines.extend(textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False))
    return lines


def plain(line: str) -> str:
    """Keeps what every terminal prints: plain spaces and signs, no control characters."""
    for fancy, plain in ((SPACE, " "), (MINUS, "-"), ("“", '"'), ("”", '"')):
        line = line.replace(fancy, plain)
    return "".join(char if char.isprintable() else "?" for char in line)
