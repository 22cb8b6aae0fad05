"""Adapt a model in several ways and say what each one adds: `diffattn dex study`."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffattn.data import Windows
from diffattn.dex import HeadPlan
from diffattn.dex.adapter import fingerprint
from diffattn.dex.base import load_base
from diffattn.errors import MissingExtraError
from diffattn.folder import begun, check_same, read_json
from diffattn.locks import held
from diffattn.models.quiet import without_progress_bars
from diffattn.report.numbers import duration_text
from diffattn.signals import stop_requests
from diffattn.study.arms import arm_named
from diffattn.study.base import base_folder, check_positions, digests
from diffattn.study.claim import claim_card
from diffattn.study.heads import chosen_plan
from diffattn.study.probes import make_probes
from diffattn.study.ready import check_packages, why_not
from diffattn.study.report import write_report
from diffattn.study.results import collect
from diffattn.study.settings import StudySettings
from diffattn.study.tasks import Bench, Task, do, is_due, tasks_of
from diffattn.study.text import prepare_text
from diffattn.training import Interrupted
from diffattn.whole_file import write_json, write_text

Say = Callable[[str], None]
_WAIT = 5.0
"""seconds between two looks at what other processes do"""


def study(
    settings: StudySettings,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    say: Say = print,
) -> dict[str, Any]:
    """Train and measure every arm, then write the results.

    Several processes may work on one folder: each takes the next run that no other one holds.
    A run that is done is one file under `runs/`, a trial one under `trials/`; `work/` holds what
    can be made again, and checkpoints of the run that was stopped.

    Args:
        settings: of the study.
        out: folder that gets `results.json`, `report.html`, `claim.md`, `plan.json`, `runs/`.
        resume: go on with what the folder holds.
        say: gets one line for each step of the work.

    Returns:
        The content of `results.json`.

    Raises:
        UserError: bad settings, model or text; or the folder holds something else.
        Interrupted: Ctrl-C; what is done is kept.
    """
    check_packages(settings.arms)
    base = base_folder(settings.model)
    model, folder = load_base(base), Path(out)
    check_positions(model, length=settings.length, context=settings.context)
    growing = ("arms", "seeds", "other_seeds")
    with begun(folder, asdict(settings), resume=resume, what="study", may_grow=growing):
        (folder / "work").mkdir(exist_ok=True)
        with held(folder / "work" / "setup.lock", wait=True):
            bench, arms = _bench(settings, folder, base, model, say)
    del model
    tasks = tasks_of(settings, arms)
    try:
        with stop_requests() as asked, without_progress_bars():
            _work(tasks, bench, say, asked)
    finally:
        results = conclude(folder)
        try:
            write_report(results, folder / "report.html")
        except MissingExtraError as error:
            say(f"no report: {error}")
    return results


def _bench(
    settings: StudySettings, folder: Path, base: Path, model: Any, say: Say
) -> tuple[Bench, list[str]]:
    work = folder / "work"
    text = prepare_text(settings.data, base, work / "tokens")
    probes = make_probes(settings, base, text, work / "tokens")
    inputs = {"data": text.digest, "outside": probes.outside_digest, **digests(base)}
    check_same(folder / "inputs.json", inputs, folder)
    Windows(text.train, settings.length, seed=0)  # refused before the plan is made
    arms = _possible(settings, folder, model, say)
    path = folder / "plan.json"
    if path.exists():
        plan = HeadPlan.read(path)
        plan.check(fingerprint(model))
    else:
        plan = chosen_plan(model, text.train, settings.heads, settings.length, 0, say)
        plan.save(path)
    return Bench(settings, folder, base, text, probes, plan), arms


def _possible(settings: StudySettings, folder: Path, model: Any, say: Say) -> list[str]:
    """The arms that this model can have; the others are recorded with the reason."""
    path = folder / "left_out.json"
    known = read_json(path) if path.exists() else {}
    reasons = {n: known[n] if n in known else why_not(n, model) for n in settings.arms}
    write_json(path, reasons)
    for name, reason in reasons.items():
        if reason is not None:
            say(f"left out: {arm_named(name).title}: {reason}")
    return [name for name, reason in reasons.items() if reason is None]


def _work(tasks: list[Task], bench: Bench, say: Say, asked: Callable[[], bool]) -> None:
    """Do what is open and not held by another process, until nothing is."""
    say(_outlook(tasks, bench))
    while open_tasks := [task for task in tasks if task.read(bench.folder) is None]:
        worked = any(_try(task, bench, say, asked) for task in open_tasks)
        if asked():
            raise Interrupted("stopped between two runs")
        if worked:
            say(_outlook(tasks, bench))
        else:
            time.sleep(_WAIT)


def _outlook(tasks: list[Task], bench: Bench) -> str:
    """How much is done, and how long the rest takes one process at the pace so far."""
    read = ((task, task.read(bench.folder)) for task in tasks)
    done = {task: record for task, record in read if record is not None}
    text = f"{len(done)} of {len(tasks)} runs and trials are done"
    work = {task: task.tokens(bench.settings) for task in tasks}
    spent = sum(record["seconds"] for record in done.values())
    known = sum(work[task] for task in done)
    left = sum(work[task] for task in tasks if task not in done)
    if known and left:
        text += f", about {duration_text(spent / known * left)} left for one process"
    elif left:
        text += f": {left / 1e3:,.0f} thousand tokens to train on or measure"
    return text


def _try(task: Task, bench: Bench, say: Say, asked: Callable[[], bool]) -> bool:
    """Do a task if it is due and nobody else's; tells whether it was done."""
    if not is_due(task, bench):
        return False
    with held(bench.work / f"{task.name}.lock", wait=False) as mine:
        if not mine or task.read(bench.folder) is not None:
            return False
        do(task, bench, say, asked)
        if task.seed is not None:
            conclude(bench.folder)
    return True


def conclude(folder: Path) -> dict[str, Any]:
    """Write results and claim card of what is done so far."""
    results = collect(folder)
    write_json(folder / "results.json", results)
    write_text(folder / "claim.md", claim_card(results))
    return results
