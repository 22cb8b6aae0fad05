"""Prints a comparison as plain text for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from diffattn.compare.answer import answer
from diffattn.compare.rows import (
    HEADLINES,
    MeasureRow,
    Results,
    arm_table,
    level_text,
    measure_table,
)
from diffattn.report.numbers import plural
from diffattn.report.text_table import Column, grid, plain, wrap
from diffattn.report.verdicts import DECIDED


def terminal_table(results: Results) -> str:
    """Prints the comparison as plain text of at most 100 columns.

    Args:
        results: The results of a comparison.

    Returns:
        The answer, the table of arms and the table of the main differences.
    """
    summary = answer(results)
    blocks = [wrap([str(results.get("title") or "Comparison")]), _arms(results)]
    differences = _differences(results)
    if differences:
        blocks.append(differences)
    sentences = [f"- {arm.label}{arm.text}" for arm in summary.arms]
    blocks.append(wrap([summary.lead, *sentences]))
    if summary.explanations:
        blocks.append(wrap(summary.explanations))
    notes = [f"Note: {note}" for note in results.get("notes") or ()]
    if notes:
        blocks.append(wrap(notes))
    return "\n\n".join("\n".join(plain(line) for line in block) for block in blocks) + "\n"


def _arms(results: Results) -> list[str]:
    columns = (
        Column("arm", 23),
        Column("params", 7, ">"),
        Column("FLOPs/tok", 9, ">"),
        Column("tokens/s", 9, ">"),
        Column("held-out loss", 15, ">"),
        Column("recall", 12, ">"),
        Column("answer", 7, ">"),
        Column("noise", 7, ">"),
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
    return grid(columns, rows)


def _differences(results: Results) -> list[str]:
    table = measure_table(results)
    shown = [row for row in table if row.measure.name in HEADLINES or row.verdict in DECIDED]
    if not shown:
        return []
    columns = (
        Column("measure, arm", 34),
        Column("difference", 12, ">"),
        Column(f"joint {level_text(results)} interval", 24, ">"),
        Column("verdict", 13),
    )
    table_lines = grid(columns, [_difference_cells(row) for row in shown])
    lines, below = table_lines[:2], iter(table_lines[2:])
    for measure, rows in itertools.groupby(shown, key=lambda row: row.measure):
        unit = f"{measure.scale.difference_unit}, " if measure.scale.difference_unit else ""
        lines.extend(wrap([f"{measure.label} ({unit}{measure.better} is better)"]))
        lines.extend(next(below) for _ in rows)
    hidden = len(table) - len(shown)
    if hidden:
        lines.append(f"and {plural(hidden, 'comparison')} by cell or depth that decided nothing")
    return lines


def _difference_cells(row: MeasureRow) -> Sequence[str]:
    label = row.arm_label if len(row.arm_label) <= 32 else f"{row.arm_label[:29]}..."
    return f"  {label}", row.difference, row.interval, row.verdict
