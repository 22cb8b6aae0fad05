"""Checks of what a benchmark is asked for."""

import math
from collections.abc import Iterable, Sequence

import torch

from diffattn.bench.sides import DTYPES
from diffattn.errors import UserError
from diffattn.ops import IMPLEMENTATIONS


def whole_numbers(argument: str, text: str, names: str, separator: str = ",") -> tuple[int, ...]:
    """Numbers of at least 1.

    Args:
        argument: for the message.
        text: the numbers.
        names: what they are, separated as they are.
        separator: what stands between them.

    Raises:
        UserError: it is something else.
    """
    try:
        found = tuple(int(number) for number in text.split(separator))
    except ValueError:
        found = ()
    if len(found) != len(names.split(separator)) or min(found) < 1:
        raise UserError(f"{argument}: expected {names}, whole numbers above 0, got {text!r}")
    return found


def above_zero(argument: str, number: float) -> None:
    """Refuse a number that is not finite and above 0.

    Raises:
        UserError: it is not.
    """
    if not 0 < number < math.inf:
        raise UserError(f"{argument}: expected a number above 0, got {number}")


def one_of(argument: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that is not among the known ones.

    Raises:
        UserError: it is not.
    """
    names = tuple(known)
    if value not in names:
        raise UserError(f"{argument}: expected one of {', '.join(names)}, got {value!r}")


def different(argument: str, values: Sequence[object]) -> None:
    """Refuse an empty list, or one that names something twice.

    Raises:
        UserError: it does.
    """
    if not values or len(set(values)) != len(values):
        raise UserError(
            f"{argument}: expected one or more, all different, got {' '.join(map(str, values))!r}"
        )


def place(dtype: str, device: str) -> None:
    """Refuse an unknown precision, or a device that is not here.

    Raises:
        UserError: it is so.
    """
    one_of("dtype", dtype, DTYPES)
    one_of("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: expected cpu, for there is no CUDA device, got 'cuda'")


def implementations(names: Sequence[str]) -> None:
    """Refuse names of no implementation; "all" stands alone.

    Raises:
        UserError: one is unknown.
    """
    different("impl", names)
    for name in names:
        one_of("impl", name, ("all",) if name == "all" and len(names) == 1 else IMPLEMENTATIONS)
