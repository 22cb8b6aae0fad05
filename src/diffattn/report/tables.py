"""What a report is made of: tables, which terminals and documents print too, and figures."""

from collections.abc import Sequence
from typing import NamedTuple

from diffattn.report.text_table import Column, grid, plain


class Table(NamedTuple):
    """A titled table; its first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For a terminal."""
        first, *others = self.columns
        columns = [Column(first, 40), *(Column(title, 24, ">") for title in others)]
        lines = [self.title, *grid(columns, self.rows), *self.notes]
        return "\n".join(plain(line) for line in lines)

    def markdown(self) -> str:
        """For a document."""
        lines = [
            f"{self.title}:",
            "",
            _row(self.columns),
            _row(["---", *["---:"] * (len(self.columns) - 1)]),
            *map(_row, self.rows),
            *(line for note in self.notes for line in ("", note)),
        ]
        return "\n".join(plain(line) for line in lines)


class Figure(NamedTuple):
    """A titled figure."""

    title: str
    svg: str
    caption: str


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
