"""The results of a study, from the records of its runs."""

import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from diffattn import __version__
from diffattn.evaluation import compare_to_first, paired_interval
from diffattn.folder import SETTINGS, read_json
from diffattn.study.arms import CLAIM, arm_named
from diffattn.study.probes import MEASURES, Measure
from diffattn.study.settings import StudySettings
from diffattn.study.tasks import tasks_of

Record = dict[str, Any]
PRIMARY = MEASURES[0].name
CONTROL, METHOD = CLAIM
ONE_SEED = "one seed"
"""in place of a verdict: how much seeds differ is unknown"""
_FLOOR = "floor"


def collect(folder: Path) -> dict[str, Any]:
    """Everything that a study has found so far.

    Args:
        folder: of the study.

    Returns:
        `arms` (means, trained parameters, rate), `claim` (DEX against attention alone, measure by
        measure), `differences` (every arm against attention alone), `floor` (differences of two
        runs that are equal in exact arithmetic), `trials`, `trajectories`, `heads`, `machines`,
        and how many runs are open.
    """
    settings = read_json(folder / SETTINGS)
    reasons = read_json(folder / "left_out.json")
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    names = [name for name in settings["arms"] if name not in left_out]
    tasks = tasks_of(StudySettings(**{**settings, "arms": tuple(settings["arms"])}), names)
    found = [(task, record) for task in tasks if (record := task.read(folder)) is not None]
    every = [record for task, record in found if task.seed is not None]
    trials = [record for task, record in found if task.seed is None]
    runs = {name: [record for record in every if record["arm"] == name] for name in names}
    return {
        "version": __version__,
        "created": datetime.now(UTC).date().isoformat(),
        "command": _command(settings),
        "settings": settings,
        "inputs": read_json(folder / "inputs.json"),
        "left_out": left_out,
        "runs_done": len(every),
        "runs_open": sum(task.seed is not None for task in tasks) - len(every),
        "arms": [_arm(name, runs[name]) for name in names if runs[name]],
        "claim": _against_control(METHOD, runs),
        "differences": {
            name: _against_control(name, runs)
            for name in names
            if name not in (CONTROL, _FLOOR) and runs[name]
        },
        "floor": _floor(runs),
        "at_the_edge": _at_the_edge(runs, settings),
        "end": {
            name: {
                key: float(np.mean([np.mean(r["trajectory"][-1][key]) for r in measured]))
                for key in measured[0]["trajectory"][-1]
                if key != "step"
            }
            for name, records in runs.items()
            if (measured := [r for r in _measured(records) if r["trajectory"]])
        },
        "trials": [
            {"arm": t["arm"], "rate": t["rate"], "loss": t["loss"]}
            for t in sorted(trials, key=lambda t: (names.index(t["arm"]), t["rate"]))
        ],
        "trajectories": {
            name: found
            for name, records in runs.items()
            if (found := next((r["trajectory"] for r in records if r.get("trajectory")), None))
        },
        "heads": {
            name: measured[0]["heads"]
            for name, records in runs.items()
            if (measured := _measured(records))
        },
        "seconds": sum(record["seconds"] for record in [*every, *trials]),
        "machines": _machines([*every, *trials]),
    }


def _measured(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if not record["diverged"]]


def _arm(name: str, records: list[Record]) -> dict[str, Any]:
    arm, measured = arm_named(name), _measured(records)
    means = {
        measure.name: [float(np.mean(r["measures"][measure.name])) for r in measured]
        for measure in MEASURES
    }
    return {
        "name": name,
        "title": arm.title,
        "about": arm.about,
        "seeds": [record["seed"] for record in records],
        "diverged": [record["seed"] for record in records if record["diverged"]],
        "rate": records[0]["rate"],
        "trained": records[0]["trained"],
        "parameters": records[0]["parameters"],
        "train_seconds": [record["train_seconds"] for record in records],
        "by_seed": means,
        "means": {key: float(np.mean(v)) if v else None for key, v in means.items()},
    }


def _against_control(name: str, runs: dict[str, list[Record]]) -> dict[str, Any]:
    """Differences to attention alone on the seeds that both have, measure by measure."""
    control = {r["seed"]: r["measures"] for r in _measured(runs.get(CONTROL, []))}
    mine = {r["seed"]: r["measures"] for r in _measured(runs.get(name, []))}
    if arm_named(name).rate is None and mine:  # the base model is the same for every seed
        only = next(iter(mine.values()))
        mine = {seed: only for seed in control}  # noqa: C420 pyright takes fromkeys for Nones
    seeds = sorted(set(control) & set(mine))
    if not seeds:
        return {}
    return {
        measure.name: _difference(
            measure,
            np.array([control[seed][measure.name] for seed in seeds]),
            np.array([mine[seed][measure.name] for seed in seeds]),
        )
        for measure in MEASURES
    }


def _difference(measure: Measure, control: np.ndarray, mine: np.ndarray) -> dict[str, Any]:
    better: Any = measure.better
    found: dict[str, Any] = {
        "control": float(control.mean()),
        "value": float(mine.mean()),
        "difference": float((mine - control).mean()),
        "seeds": len(mine),
    }
    if len(mine) > 1:
        pair = {CONTROL: control, "mine": mine}
        (compared,) = compare_to_first(pair, better=better, comparisons=1)
        interval, verdict = compared.interval, compared.verdict
        over = f"{len(mine)} seeds, {mine.shape[1]} items"
    else:
        interval, verdict = paired_interval((mine - control)[0]), ONE_SEED
        over = f"{mine.shape[1]} items of one seed"
    found["interval"] = None if interval is None else list(interval)
    return {**found, "over": over, "verdict": verdict}


def _floor(runs: dict[str, list[Record]]) -> dict[str, float] | None:
    """Size of the difference of two runs that are equal in exact arithmetic."""
    control = {r["seed"]: r["measures"] for r in _measured(runs.get(CONTROL, []))}
    same = _measured(runs.get(_FLOOR, []))
    if not same or same[0]["seed"] not in control:
        return None
    other = control[same[0]["seed"]]
    return {
        measure.name: abs(
            float(np.mean(same[0]["measures"][measure.name]) - np.mean(other[measure.name]))
        )
        for measure in MEASURES
    }


def _at_the_edge(runs: dict[str, list[Record]], settings: dict[str, Any]) -> list[str]:
    """Arms whose best rate was the lowest or the highest that was tried."""
    rates, found = sorted(settings["rates"]), []
    for name, records in runs.items():
        arm = arm_named(name)
        if records and arm.rate is not None and len(rates) > 2 and arm.like is None:
            ends = arm.rate * rates[0], arm.rate * rates[-1]
            if any(abs(records[0]["rate"] / end - 1) < 1e-6 for end in ends):
                found.append(name)
    return found


def _machines(records: list[Record]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for record in records:
        if record["machine"] not in found:
            found.append(record["machine"])
    return found


def _command(settings: dict[str, Any]) -> str:
    """The command that gives these settings, without the options that are defaults."""
    usual = StudySettings(model=settings["model"])
    parts = ["diffattn dex study", shlex.quote(str(settings["model"]))]
    for name, value in settings.items():
        default = getattr(usual, name)
        default = list(default) if isinstance(default, tuple) else default
        if name == "model" or value == default:
            continue
        option = "--" + name.replace("_", "-")
        if value is True:
            parts.append(option)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            parts.append(f"{option} {shlex.quote(text)}")
    return " ".join([*parts, "--out DIR"])
