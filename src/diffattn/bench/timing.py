"""Times of the sides that are right, taken in turns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffattn.bench.accuracy import LIMIT, error_ratio
from diffattn.bench.sides import BASE, DTYPES, Shape, Side, one_pass, operands
from diffattn.bench.spread import Spread, ratio
from diffattn.evaluation import take_turns
from diffattn.report.numbers import bytes_text

ROUNDS = 5
"""turns of every side, at the least"""
_SHORTEST = 0.002  # seconds of a turn: the clock and the interpreter stay far below it
_COPIES = 4  # of a map of scores that the definition holds at once


def timed(
    sides: Mapping[Side, Shape], kind: str, dtype: str, device: str, seconds: float
) -> dict[str, Any]:
    """Check every side, then time those that are right.

    Args:
        sides: with their sizes.
        kind: of pass, one of PASSES.
        dtype: one of DTYPES.
        device: "cpu" or "cuda".
        seconds: for all sides together; each has at least ROUNDS turns.

    Returns:
        By the sides' names: `errors` in units of torch's own, `seconds` of every turn,
        `left_out` with the reason, `wrong` with what is wrong.
    """
    errors, left_out, wrong = {}, {}, {}
    passes = {}
    for side, shape in sides.items():
        try:
            found = error_ratio(side, shape, DTYPES[dtype], device)
            if not found <= LIMIT:  # NaN is wrong too
                wrong[side.name] = (
                    f"its error is {found:.3g} times torch's own, expected {LIMIT:g} or less"
                )
                continue
            _check_memory(side, shape, device)
            run = one_pass(side, operands(side, shape, DTYPES[dtype], device), kind)
            run()
        except (NotImplementedError, ValueError, MemoryError) as error:
            left_out[side.name] = str(error)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            left_out[side.name] = str(error).splitlines()[0]
        else:
            errors[side.name], passes[side.name] = found, run
    rows = []
    if passes:
        rows = take_turns(
            list(passes.values()), rounds=ROUNDS, seconds=seconds, shortest=_SHORTEST
        ).tolist()
    return {
        "errors": errors,
        "seconds": dict(zip(passes, rows, strict=True)),
        "left_out": left_out,
        "wrong": wrong,
    }


def ratios(record: dict[str, Any]) -> dict[str, tuple[Spread | None, Spread | None]]:
    """Of every timed side: to torch's softmax attention, to our softmax in its implementation."""
    times = record["seconds"]
    return {
        name: (
            ratio(taken, times.get(BASE.name)),
            ratio(taken, times.get(Side("softmax", name.split(", ")[1]).name)),
        )
        for name, taken in times.items()
    }


def wrong_sides(results: dict[str, Any]) -> list[str]:
    """What makes a command fail: a side that is wrong, a line each."""
    return [
        f"{task}: {side} is wrong: {reason}"
        for task, record in results["records"].items()
        for side, reason in record["wrong"].items()
    ]


def _check_memory(side: Side, shape: Shape, device: str) -> None:
    """Refuse the definition, which holds whole maps, where they would not fit.

    Raises:
        MemoryError: they would not.
    """
    if side.impl != "reference":
        return
    maps = 1 if side.form == BASE.form else 2
    needed = _COPIES * maps * shape.batch * shape.heads * shape.queries * shape.keys * 4
    free = _free(device)
    if needed > free:
        raise MemoryError(
            f"whole maps take about {bytes_text(needed)}, and {bytes_text(free)} are free"
        )


def _free(device: str) -> float:
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return float("inf")
