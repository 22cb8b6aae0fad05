"""Runs a benchmark: measures, then writes results.json and report.html."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from diffattn.bench.report import write_report
from diffattn.bench.work import Results, Settings, measured
from diffattn.report.tables import Table

KINDS = ("operator", "lengths", "model", "auto")


def kind_of(name: str) -> ModuleType:
    """The module of a benchmark: Settings, measure, tables, brief, figures and problems."""
    return importlib.import_module(f"diffattn.bench.{name}")  # model alone needs transformers


def settings_of(kind: str, given: Mapping[str, Any]) -> Settings:
    """Settings of a benchmark; lists become tuples.

    Raises:
        UserError: one of them is out of place.
    """
    listed = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return kind_of(kind).Settings(**listed)


def bench(
    kind: str,
    settings: Settings,
    out: str | Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[Results, Sequence[Table], Sequence[str]]:
    """Run a benchmark.

    Args:
        kind: one of KINDS.
        settings: of that kind.
        out: folder of results.json, which is written after every measurement, and report.html.
        resume: go on with what the folder holds, measured under the same settings.
        say: takes a line of progress.

    Returns:
        The results, their tables, and lines about what failed.

    Raises:
        UserError: the folder holds something else.
    """
    module = kind_of(kind)
    results = measured(kind, settings, module.measure, Path(out), resume=resume, say=say)
    tables, problems = module.tables(results), module.problems(results)
    write_report(results, tables, module.figures(results), problems, Path(out) / "report.html")
    return results, tables, problems
