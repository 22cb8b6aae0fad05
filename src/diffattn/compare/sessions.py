"""Sessions of a comparison: each command that worked on it, with its time and memory."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diffattn.compare.plan import said_plainly
from diffattn.whole_file import write_json

_FIELDS = {"ended", "wall_seconds", "peak_memory_bytes", "seeds", "finished", "machine"}


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """The sessions so far; none where the file is missing or damaged."""
    try:
        sessions = json.loads(path.read_text(encoding="utf-8"))
        return sessions if all(set(session) >= _FIELDS for session in sessions) else []
    except (OSError, ValueError, TypeError):
        return []


@contextmanager
def recorded_session(
    path: Path,
    *,
    started: float,
    seeds: int,
    machine: dict[str, Any],
    peak_memory_bytes: Callable[[], int],
) -> Iterator[None]:
    """Record the block as one session, whether it finishes, fails or is stopped.

    Args:
        path: file of the sessions; a killed process leaves no trace in it.
        started: `time.monotonic()` at the start of the command.
        seeds: of the plan.
        machine: what the session ran on.
        peak_memory_bytes: tells at the end how much memory the session took.

    Yields:
        Nothing.
    """
    finished = False
    try:
        yield
        finished = True
    finally:
        session = {
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
            "seeds": seeds,
            "finished": finished,
            "machine": machine,
        }
        with said_plainly(path):
            write_json(path, [*read_sessions(path), session])


def summary(sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """What the results file says of all sessions together.

    Args:
        sessions: at least one.

    Returns:
        When the comparison was finished, on what, in how much time over all sessions, and with
        how much memory in the largest.
    """
    return {
        "created": sessions[-1]["ended"],
        "machine": sessions[-1]["machine"],
        "wall_seconds": sum(session["wall_seconds"] for session in sessions),
        "peak_memory_bytes": max(session["peak_memory_bytes"] for session in sessions),
    }


def earlier_looks(sessions: list[dict[str, Any]], seeds: int) -> list[int]:
    """Numbers of seeds, fewer than now, whose verdicts were seen before these were added.

    One seed decides nothing, so it is no look.
    """
    return sorted({s["seeds"] for s in sessions if s["finished"] and 1 < s["seeds"] < seeds})
