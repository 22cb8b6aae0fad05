"""The comparison as a whole: one call from text to report."""

import platform
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from diffattn import __version__
from diffattn.compare.arms import DEFAULT_ARMS, parse_arms
from diffattn.compare.corpus import Corpus, prepare_corpus
from diffattn.compare.plan import ComparePlan, OutputFolder, said_plainly
from diffattn.compare.pool import Workers, execute_runs, unfinished_runs
from diffattn.compare.presets import get_preset
from diffattn.compare.report import write_report
from diffattn.compare.results import collect_results
from diffattn.compare.run import check_text, peak_memory_bytes, read_result
from diffattn.compare.sessions import earlier_looks, read_sessions, recorded_session, summary
from diffattn.compare.speed import measure_rates, rates_by_arm, read_rates
from diffattn.errors import UserError
from diffattn.report.numbers import plural
from diffattn.whole_file import write_json

_SPEED = "speed.json"
_SESSIONS = "sessions.json"


def compare(
    out: str | Path,
    *,
    arms: str = DEFAULT_ARMS,
    preset: str = "quick",
    seeds: int = 3,
    data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    tokens: int | None = None,
    resume: bool = False,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train several architectures on the same data and compare them on held-out data.

    Args:
        out: folder for `results.json`, `report.html`, the runs and their models.
        arms: names separated by commas, see `parse_arms`; the first is the baseline.
        preset: "smoke", "quick", "laptop" or "gpu".
        seeds: number of seeds; each is trained in every arm. On a resume it may have grown.
        data: text to train on: a file, a folder, a JSONL or a saved data set; None is the
            bundled corpus.
        tokenizer: folder of a tokenizer with BOS and EOS; None trains one on the training text.
        tokens: training tokens of one run; None is the preset's.
        resume: whether to go on with what `out` holds.
        jobs: processes at a time; None means one for each core, or one for an accelerator.
        say: is told what happens, a line at a time.

    Returns:
        The record that `results.json` holds.

    Raises:
        UserError: bad input, in one line.
        StoppedError: the person asked to stop; `resume` goes on.
    """
    started = time.monotonic()
    sizes = get_preset(preset)
    if tokens is not None:
        sizes = replace(sizes, tokens=tokens)
    plan = ComparePlan(
        arms=tuple(parse_arms(arms)),
        seeds=seeds,
        preset=sizes,
        data=None if data is None else str(_path("data", data).resolve()),
        tokenizer=None if tokenizer is None else str(_path("tokenizer", tokenizer).resolve()),
    )
    runs = len(plan.arms) * plan.seeds
    workers = Workers.for_machine(runs=runs, accelerator=torch.cuda.is_available(), jobs=jobs)
    folder = OutputFolder(_path("out", out), plan, resume=resume)
    with folder.locked():
        corpus = prepare_corpus(plan, folder.data)
        check_text(plan, corpus)
        folder.adopt(plan)
        say(_announcement(plan, corpus, workers))
        _work(plan, folder, corpus, workers, started=started, say=say)
        rates = rates_by_arm(plan, read_rates(plan, folder.path / _SPEED))
        sessions = read_sessions(folder.path / _SESSIONS)
        records = {
            arm.name: [read_result(folder.run(arm, seed)) or {} for seed in range(plan.seeds)]
            for arm in plan.arms
        }
        looks = earlier_looks(sessions, plan.seeds)
        results = {
            "title": " against ".join((plan.arms[-1].label, plan.arms[0].label))
            if len(plan.arms) == 2
            else f"{len(plan.arms)} kinds of attention compared",
            "command": _command(plan, folder.path),
            "version": __version__,
            **collect_results(plan, corpus, records, rates, looks),
            **summary(sessions),
        }
        with said_plainly(folder.path):
            write_json(folder.path / "results.json", results)
            write_report(results, folder.path / "report.html")
    return results


def _path(name: str, path: str | Path) -> Path:
    try:
        if "\0" in str(path):
            raise RuntimeError("it holds a NUL character")
        return Path(path).expanduser()
    except RuntimeError as error:  # also: the home directory of nobody
        raise UserError(f"{name}: expected a path, got {str(path)!r}: {error}") from error


def _work(
    plan: ComparePlan,
    folder: OutputFolder,
    corpus: Corpus,
    workers: Workers,
    *,
    started: float,
    say: Callable[[str], None],
) -> None:
    """Train and measure what is left; where nothing is, leave no trace."""
    todo = unfinished_runs(plan, folder)
    timed = len(read_rates(plan, folder.path / _SPEED)) == plan.seeds
    if not todo and timed and read_sessions(folder.path / _SESSIONS):
        return

    def peak() -> int:
        results = [read_result(folder.run(arm, seed)) for arm, seed in todo]
        peaks = [result["peak_memory_bytes"] for result in results if result is not None]
        return peak_memory_bytes() + workers.jobs * max(peaks, default=0)

    with recorded_session(
        folder.path / _SESSIONS,
        started=started,
        seeds=plan.seeds,
        machine=_machine(workers),
        peak_memory_bytes=peak,
    ):
        execute_runs(plan, folder, workers)
        if not timed:
            say("measuring training speed, arms in turn")
            measure_rates(plan, corpus, folder.path / _SPEED)


def _announcement(plan: ComparePlan, corpus: Corpus, workers: Workers) -> str:
    facts = corpus.facts
    processes = plural(workers.jobs, "process", "processes")
    return (
        f"{len(plan.arms)} arms x {plural(plan.seeds, 'seed')}, {plan.training_steps} steps of "
        f"{plan.tokens_per_step:,.0f} tokens each; {facts['source']}: {facts['documents_train']} "
        f"of {plural(facts['documents_train_given'], 'document')} to train on "
        f"({facts['tokens_train']:,} tokens), {facts['documents_heldout']} of "
        f"{facts['documents_heldout_given']} held out; {processes} of "
        f"{plural(workers.threads, 'thread')}"
    )


def _machine(workers: Workers) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": f"{device} ({platform.machine()})",
        "cores": workers.jobs * workers.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads_per_run": workers.threads,
        "jobs": workers.jobs,
    }


def _command(plan: ComparePlan, out: Path) -> str:
    arms = ",".join(arm.name.split("#")[0].replace("@lr", ":lr=") for arm in plan.arms)
    parts = [f"diffattn compare --arms {arms} --preset {plan.preset.name} --seeds {plan.seeds}"]
    if plan.data is not None:
        parts.append(f"--data {shlex.quote(plan.data)}")
    if plan.tokenizer is not None:
        parts.append(f"--tokenizer {shlex.quote(plan.tokenizer)}")
    if plan.preset.tokens != get_preset(plan.preset.name).tokens:
        parts.append(f"--tokens {plan.preset.tokens}")
    parts.append(f"--out {shlex.quote(str(out))}")
    return " ".join(parts)
