"""Measurements one after another, each kept as soon as it is whole."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from diffattn.folder import begun, read_json
from diffattn.machine import machine
from diffattn.report.numbers import duration_text
from diffattn.whole_file import write_json

Record = dict[str, Any]
Results = dict[str, Any]
RESULTS = "results.json"


class Settings(Protocol):
    """What a benchmark measures: a dataclass that checks itself."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    GROWS: ClassVar[tuple[str, ...]]
    """fields that may be more when a folder is gone on with"""

    def tasks(self) -> Mapping[str, Any]:
        """What is measured in one piece, by its name."""
        ...


def measured(
    kind: str,
    settings: Settings,
    measure: Callable[[Any, Any], Record],
    out: Path,
    *,
    resume: bool,
    say: Callable[[str], None],
) -> Results:
    """Measure what the folder does not hold yet.

    Args:
        kind: of the benchmark.
        settings: its settings.
        measure: takes settings and a task, returns its record.
        out: folder; holds results.json after every task.
        resume: whether it may hold results.
        say: takes a line of progress.

    Returns:
        `kind`, `command`, `machine`, `settings` and `records`, by task.

    Raises:
        UserError: the folder holds something else, results of another machine or other settings.
    """
    values = dataclasses.asdict(settings)
    here = machine()
    with begun(
        out,
        {"kind": kind, **values, **here},
        resume=resume,
        what="benchmark",
        may_grow=settings.GROWS,
    ):
        path = out / RESULTS
        kept = read_json(path)["records"] if path.exists() else {}
    tasks = settings.tasks()
    results = {
        "kind": kind,
        "command": _command(kind, values),
        "machine": here,
        "settings": values,
        "records": {name: record for name, record in kept.items() if name in tasks},
    }
    todo = [name for name in tasks if name not in results["records"]]
    started = time.monotonic()
    for done, name in enumerate(todo):
        if done:
            left = (time.monotonic() - started) / done * (len(todo) - done)
            about = f"about {duration_text(left)} left"
        else:
            about = f"at least {duration_text(values['seconds'] * len(todo))} to go"
        say(f"[{len(tasks) - len(todo) + done + 1}/{len(tasks)}] {name}; {about}")
        record = measure(settings, tasks[name])
        for side, reason in record.get("left_out", {}).items():
            say(f"  {side} left out: {reason}")
        results["records"][name] = record
        write_json(path, results)
    return results


def _command(kind: str, values: Mapping[str, Any]) -> str:
    words = ["diffattn", "bench", kind]
    for name, value in values.items():
        if value is None:
            continue
        listed = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, listed)]
    return shlex.join([*words, "--out", "DIR"])
