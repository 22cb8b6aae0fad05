"""Writes the results of a benchmark as one self-contained page."""

from pathlib import Path
from typing import Any

from diffattn.report.page import render_page
from diffattn.report.tables import Figure, Table
from diffattn.whole_file import write_text

Results = dict[str, Any]


def write_report(
    results: Results, tables: list[Table], figures: list[Figure], problems: list[str], path: Path
) -> None:
    """Writes the page, whole or not at all.

    Raises:
        MissingExtraError: Where matplotlib or Jinja2 is missing.
    """
    machine = results["machine"]
    context = {
        "title": f"diffattn bench {results['kind']}",
        "subtitle": f"{machine['accelerator'] or machine['processor']} · {machine['threads']} "
        f"threads · torch {machine['torch']} · diffattn {machine['diffattn']}",
        "problems": problems,
        "figures": figures,
        "tables": tables,
        "command": results["command"],
        "machine": [(name.replace("_", " "), str(value)) for name, value in machine.items()],
    }
    write_text(path, render_page("diffattn.bench", "bench.html.jinja", context))
