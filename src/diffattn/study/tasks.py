"""The runs of a study: each one a file that appears when it is done."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffattn.data import TextStream, Windows
from diffattn.dex import HeadPlan
from diffattn.evaluation import item_losses
from diffattn.machine import machine
from diffattn.study.arms import CLAIM, arm_named
from diffattn.study.probes import Probes, measure, measure_heads
from diffattn.study.ready import Ready, make_ready, trained_parameters
from diffattn.study.settings import StudySettings
from diffattn.study.text import Text
from diffattn.study.training import train_adaptation
from diffattn.training import DivergedError
from diffattn.whole_file import write_json

Say = Callable[[str], None]
_TUNING_SEED = 1_000_000
"""of the order of text in trials: no run has it"""


@dataclass(frozen=True)
class Task:
    """A trial of a learning rate or a run.

    Args:
        arm: name.
        seed: of a run; None for a trial.
        multiple: of the arm's usual rate; None for a run.
    """

    arm: str
    seed: int | None = None
    multiple: float | None = None

    @property
    def name(self) -> str:
        """In files and in lines of progress."""
        if self.seed is None:
            return f"{self.arm}-x{self.multiple:g}"
        return f"{self.arm}-{self.seed}"

    def record(self, folder: Path) -> Path:
        """The file that tells that it is done."""
        return folder / ("trials" if self.seed is None else "runs") / f"{self.name}.json"

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Its record, or None where there is none that can be read."""
        try:
            found = json.loads(self.record(folder).read_text(encoding="utf-8"))
            whole = found["arm"] == self.arm and found["machine"] and found["seconds"] >= 0
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if whole else None

    def tokens(self, settings: StudySettings) -> int:
        """Tokens to train on and to measure, the latter at a third of the price."""
        if self.seed is None:
            steps, windows, lists = settings.tuning_steps, settings.tuning_windows, 0
        else:
            steps = 0 if arm_named(self.arm).rate is None else settings.steps
            windows = settings.heldout_windows + settings.outside_windows
            lists = 2 * settings.items
        measured = windows * settings.length + lists * settings.context
        return steps * settings.rows * settings.length + measured // 3


@dataclass(frozen=True)
class Bench:
    """What all tasks of a study work with.

    Args:
        settings: of the study.
        folder: of the study; `work` in it may be deleted between sessions.
        base: folder of the base model.
        text: to train on.
        probes: to measure on.
        plan: heads that DEX extends.
    """

    settings: StudySettings
    folder: Path
    base: Path
    text: Text
    probes: Probes
    plan: HeadPlan

    @property
    def work(self) -> Path:
        """Folder of checkpoints and of what can be made again."""
        return self.folder / "work"


def tasks_of(settings: StudySettings, arms: list[str]) -> list[Task]:
    """All tasks in the order in which they are worth doing: the claim first, seed by seed."""
    tasks = [Task("base", seed=0)] if "base" in arms else []
    others = [name for name in arms if name not in (*CLAIM, "base")]
    for names in (CLAIM, *((name,) for name in others)):
        tasks += [task for name in names for task in _trials(name, settings)]
        for seed in range(max(len(settings.seeds_of(name)) for name in names)):
            tasks += [Task(name, seed=seed) for name in names if seed in settings.seeds_of(name)]
    return tasks


def _trials(name: str, settings: StudySettings) -> list[Task]:
    arm = arm_named(name)
    if len(settings.rates) == 1 or arm.rate is None or arm.like is not None:
        return []
    return [Task(name, multiple=multiple) for multiple in settings.rates]


def rate_of(arm: str, settings: StudySettings, folder: Path) -> float | None:
    """The learning rate of an arm's runs: the trial with the lowest loss; None before all trials.

    A trial that diverged loses to any that did not.
    """
    source = arm_named(arm_named(arm).like or arm)
    usual = source.rate
    if usual is None or len(settings.rates) == 1:
        return None if usual is None else usual * settings.rates[0]
    found = []
    for multiple in settings.rates:
        trial = Task(source.name, multiple=multiple).read(folder)
        if trial is None:
            return None
        found.append(trial)
    best = min(found, key=lambda f: float("inf") if f["loss"] is None else f["loss"])
    return best["rate"]


def is_due(task: Task, bench: Bench) -> bool:
    """Whether everything that a task needs is there."""
    trains = arm_named(task.arm).rate is not None
    needs_rate = task.seed is not None and trains
    return not needs_rate or rate_of(task.arm, bench.settings, bench.folder) is not None


def _ramp_steps(settings: StudySettings, steps: int) -> int:
    """T of a run or trial of so many steps."""
    wanted = settings.steps // 2 if settings.ramp_steps is None else settings.ramp_steps
    return max(1, round(wanted * steps / settings.steps))


def do(task: Task, bench: Bench, say: Say, should_stop: Callable[[], bool]) -> None:
    """Do a task and write its record.

    Raises:
        Interrupted: `should_stop` asked for it; the task goes on from there the next time.
        UserError: the model cannot have the arm.
    """
    settings, place = bench.settings, bench.work / task.name
    arm = arm_named(task.arm)
    steps = settings.tuning_steps if task.seed is None else settings.steps
    if task.multiple is not None:
        assert arm.rate is not None
        rate: float | None = arm.rate * task.multiple
    else:
        rate = rate_of(task.arm, settings, bench.folder)
    seed = _TUNING_SEED if task.seed is None else task.seed
    ready = make_ready(
        task.arm,
        bench.base,
        bench.plan,
        ramp_steps=_ramp_steps(settings, steps),
        lam_rate=settings.lam_rate,
        seed=seed,
        work=bench.work,
    )
    record: dict[str, Any] = {
        "arm": task.arm,
        "rate": rate,
        "steps": steps if rate is not None else 0,
        "parameters": sum(p.numel() for p in ready.model.parameters()),
        "trained": trained_parameters(ready.model),
    }
    diverged, seconds = False, None
    if rate is not None:
        try:
            seconds = _train(task, ready, bench, steps, rate, seed, say, should_stop)
        except DivergedError as error:
            diverged = True
            say(f"{task.name}: {error}")
        if not _is_finite(ready.model):
            diverged = True
            say(f"{task.name}: weights are not finite after training")
    began = time.monotonic()
    record |= {"train_seconds": seconds, "diverged": diverged}
    if task.seed is None:
        record["loss"] = None
        if not diverged:
            losses = item_losses(ready.finish(ready.model), bench.probes.tuning)
            record["loss"] = float(losses.mean()) if np.isfinite(losses).all() else None
    else:
        record["seed"] = task.seed
        if not diverged:
            record |= _measured(task, ready, bench, say)
    spent = (seconds or 0.0) + time.monotonic() - began
    record |= {"seconds": spent, "machine": machine()}
    path = task.record(bench.folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    shutil.rmtree(place, ignore_errors=True)
    if task.seed is None:
        loss = record["loss"]
        say(f"{task.name}: rate {rate:g}, loss {'none' if loss is None else f'{loss:.4f}'}")


def _is_finite(model: Any) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.requires_grad)


def _measured(task: Task, ready: Ready, bench: Bench, say: Say) -> dict[str, Any]:
    say(f"{task.name}: measuring")
    model = ready.finish(ready.model).eval()
    found = measure(model, bench.probes)
    if not all(np.isfinite(values).all() for values in found.values()):
        say(f"{task.name}: a measure is not finite")
        return {"diverged": True}
    heads = measure_heads(model, bench.probes)
    means = ", ".join(f"{name} {sum(v) / len(v):.4f}" for name, v in found.items())
    say(f"{task.name}: {means}")
    records = [] if ready.trajectory is None else ready.trajectory.records
    return {"measures": found, "heads": heads, "trajectory": records}


def _train(
    task: Task,
    ready: Ready,
    bench: Bench,
    steps: int,
    rate: float,
    seed: int,
    say: Say,
    should_stop: Callable[[], bool],
) -> float:
    """Train and return the seconds of its steps."""
    settings, place = bench.settings, bench.work / task.name
    place.mkdir(parents=True, exist_ok=True)
    if ready.trajectory is not None:
        ready.trajectory.path = place / "trajectory.json"
    stream = TextStream(
        Windows(bench.text.train, settings.length, seed=seed),
        rows_per_step=settings.rows,
        steps=steps,
    )
    return train_adaptation(
        ready.model,
        stream,
        place / "train",
        rows=settings.rows,
        learning_rate=rate,
        seed=seed,
        bf16=settings.bf16,
        keep=task.seed is not None,
        trainer=ready.trainer,
        callbacks=[*ready.callbacks, *([ready.trajectory] if ready.trajectory else [])],
        say=lambda line: say(f"{task.name}: {line}"),
        should_stop=should_stop,
    )
