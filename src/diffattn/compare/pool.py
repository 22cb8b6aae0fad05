"""Runs of a comparison on several processes, with progress and a clean stop."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from diffattn.compare.arms import Arm
from diffattn.compare.plan import ComparePlan, OutputFolder
from diffattn.compare.run import execute_run, read_result
from diffattn.errors import UserError
from diffattn.signals import asks_once, handled

# what measuring a run costs, in steps of training, for the estimate of the time left
MEASURING_SHARE = 0.15
LINE_EVERY_SECONDS = 20.0


class StoppedError(Exception):
    """The person asked to stop; what ran is saved."""


@dataclass(frozen=True, slots=True)
class Workers:
    """How the runs are spread over the machine."""

    jobs: int
    """Processes at a time."""
    threads: int
    """Threads of each."""

    @classmethod
    def for_machine(cls, *, runs: int, accelerator: bool, jobs: int | None = None) -> "Workers":
        """One process a core for runs on a CPU, one process for an accelerator.

        Small models use one thread each far better than several threads one model.

        Args:
            runs: runs that are left.
            accelerator: whether they run on one.
            jobs: a number that is asked for instead.

        Raises:
            UserError: fewer than one job.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cores = cores or 1
        if jobs is not None and jobs < 1:
            raise UserError(f"jobs: expected at least 1, got {jobs}")
        if jobs is None:
            jobs = 1 if accelerator else cores
        jobs = max(1, min(jobs, runs))
        return cls(jobs=jobs, threads=max(1, cores // jobs))


def unfinished_runs(plan: ComparePlan, folder: OutputFolder) -> list[tuple[Arm, int]]:
    """Arm and seed of every run that has no result yet, in the order in which they start."""
    return [
        (arm, seed)
        for seed in range(plan.seeds)
        for arm in plan.arms
        if read_result(folder.run(arm, seed)) is None
    ]


def execute_runs(plan: ComparePlan, folder: OutputFolder, workers: Workers) -> None:
    """Train and measure every run that is not finished.

    Args:
        plan: the comparison.
        folder: its folder, with the text prepared.
        workers: processes and threads.

    Raises:
        StoppedError: Ctrl-C or SIGTERM; every run that was under way has saved a checkpoint.
        UserError: a run failed; finished runs are kept.
    """
    todo = unfinished_runs(plan, folder)
    if not todo:
        return
    context = multiprocessing.get_context("spawn")
    stop, messages = context.Event(), context.Queue()
    os.environ["OMP_NUM_THREADS"] = str(workers.threads)
    executor = ProcessPoolExecutor(
        workers.jobs,
        mp_context=context,
        initializer=_start_worker,
        initargs=(stop, messages, workers.threads, os.getpid()),
    )
    progress = _Progress(plan, todo, messages)
    with executor, progress.shown():
        # workers inherit it: a Ctrl-C reaches the whole group, also while they are importing
        with handled([signal.SIGINT], signal.SIG_IGN):
            futures = {
                executor.submit(_work, plan, arm, seed, folder): (arm, seed) for arm, seed in todo
            }
        with handled([signal.SIGINT, signal.SIGTERM], asks_once(stop)):
            _collect(futures, stop, progress)


def _collect(futures: dict[Future[Any], tuple[Arm, int]], stop: Any, progress: "_Progress") -> None:
    """Wait for the runs; on the first failure let the others save themselves, then raise it."""
    pending, failure, asked = set(futures), None, False
    while pending:
        done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
        asked = asked or (failure is None and stop.is_set())
        for future in done:
            error = future.exception()
            if error is None:
                progress.finished(*futures[future], future.result())
            elif failure is None or isinstance(failure, StoppedError):
                failure = error
        if failure is not None:
            stop.set()  # runs that are under way save themselves, those that wait end at once
    if isinstance(failure, BrokenProcessPool):
        if asked:
            raise StoppedError from failure
        raise UserError(
            "runs: a worker process was killed from outside (out of memory?); finished runs are "
            "kept, add --resume to go on"
        ) from failure
    if failure is not None:
        raise failure
    if stop.is_set():
        raise StoppedError


class _Progress:
    """One bar over all runs, and a line for each that ends."""

    def __init__(self, plan: ComparePlan, todo: list[tuple[Arm, int]], messages: Any) -> None:
        self.messages = messages
        self.steps = plan.training_steps
        self.measuring = round(MEASURING_SHARE * self.steps)
        self.total = len(todo) * (self.steps + self.measuring)
        self.done: dict[tuple[str, int], int] = {}
        self.ended = 0
        self.runs = len(todo)
        self._bar: Any = None
        self._count = 0
        self._told = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._over = threading.Event()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar while the block runs."""
        self._bar = tqdm(
            total=self.total,
            disable=not sys.stderr.isatty(),  # a file gets lines instead
            dynamic_ncols=True,
            mininterval=1.0,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} elapsed{postfix}",
            desc=f"run 0/{self.runs}",
        )
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        try:
            yield
        finally:
            self._over.set()
            listener.join(timeout=2)
            self._bar.close()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                name, seed, step = self.messages.get(timeout=0.5)
            except (queue.Empty, EOFError, OSError):
                continue
            self._advance((name, seed), step)

    def _advance(self, run: tuple[str, int], step: int) -> None:
        gained = step - self.done.get(run, 0)
        if gained <= 0:
            return
        self.done[run] = step
        now = time.monotonic()
        if self._first is None:  # starting a process takes seconds that say nothing of the rest
            self._first = now, self._count + gained
        self._count += gained
        since, before = self._first
        left = ""
        if self._count > before:
            rate = (self._count - before) / (now - since)
            left = f"{tqdm.format_interval((self.total - self._count) / rate)} left"
        self._bar.set_postfix_str(left, refresh=False)
        self._bar.update(gained)
        if self._bar.disable and now - self._told > LINE_EVERY_SECONDS:
            self._told = now
            print(f"{self._count / self.total:.0%} done, {left}", file=sys.stderr, flush=True)

    def finished(self, arm: Arm, seed: int, result: dict[str, Any]) -> None:
        """Tell the result of a run."""
        self.ended += 1
        self._advance((arm.name, seed), self.steps + self.measuring)
        self._bar.set_description_str(f"run {self.ended}/{self.runs}", refresh=False)
        recall = [item["accuracy"] for item in result["recall_items"]]
        told = f", recall {100 * sum(recall) / len(recall):.1f} %" if recall else ""
        self._bar.write(
            f"{arm.label}, seed {seed}: held-out loss {result['heldout_loss']:.4f} nats/token"
            f"{told}, {result['train_seconds']:.0f} s of training",
            file=sys.stderr,
        )


# set in each worker by its initialiser: the only way into a process of the pool
_worker: dict[str, Any] = {}


def _start_worker(stop: Any, messages: Any, threads: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, the worker saves
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _worker.update(stop=stop, messages=messages, parent=parent, busy=False)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End an idle worker whose parent was killed; a busy one saves its run first."""
    while os.getppid() == _worker["parent"] or _worker["busy"]:
        time.sleep(1)
    os._exit(1)


def _work(plan: ComparePlan, arm: Arm, seed: int, folder: OutputFolder) -> dict[str, Any]:
    from diffattn.training import Interrupted

    last_told = 0.0

    def tell(step: int, steps: int, seconds: float) -> None:
        nonlocal last_told
        if step == steps or time.monotonic() - last_told > 0.5:
            last_told = time.monotonic()
            _worker["messages"].put((arm.name, seed, step))

    def should_stop() -> bool:
        return _worker["stop"].is_set() or os.getppid() != _worker["parent"]

    if should_stop():
        raise StoppedError
    _worker["busy"] = True
    try:
        return execute_run(
            plan,
            arm,
            seed,
            data=folder.data,
            folder=folder.run(arm, seed),
            on_progress=tell,
            should_stop=should_stop,
        )
    except Interrupted as error:
        raise StoppedError from error
    finally:
        _worker["busy"] = False
