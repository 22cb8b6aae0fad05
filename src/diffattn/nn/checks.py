"""Refusals of values without meaning, in sentences that name the argument."""

import difflib
import math
from collections.abc import Collection, Iterable
from numbers import Real

from torch import Tensor


def check_number(
    name: str, value: object, *, least: int | None = None, above: int | None = None
) -> None:
    """Refuse what is no finite number in its range.

    Args:
        name: the argument's, for the message.
        value: what came.
        least: smallest number allowed; None means any.
        above: a bound that is itself refused; None means none.

    Raises:
        ValueError: another value, NaN and infinity included.
    """
    number = float(value) if isinstance(value, Real) else math.nan
    fits = math.isfinite(number)
    fits = fits and (least is None or number >= least) and (above is None or number > above)
    if not fits:
        bound = "" if least is None else f", at least {least}"
        bound = bound if above is None else f" above {above}"
        raise ValueError(f"{name}: expected a finite number{bound}, got {value!r}")


def check_options(caller: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse an unknown option under the name of the class or preset that was called.

    Args:
        caller: that name.
        given: names of the options that came.
        known: names that are understood.

    Raises:
        TypeError: an unknown name, as Python's own, with the nearest known one.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


def check_sequence(name: str, x: Tensor, width_name: str, width: int) -> None:
    """Refuse what is no batch of sequences [batch, time, width].

    Args:
        name: the argument's, for the message.
        x: what came.
        width_name: what the layer calls the width.
        width: size of the last axis.

    Raises:
        ValueError: other axes or another width.
    """
    if x.dim() != 3 or x.shape[-1] != width:
        letter = "S" if name == "context" else "T"
        raise ValueError(
            f"{name}: expected [B, {letter}, {width_name}] = [B, {letter}, {width}], got shape "
            f"{tuple(x.shape)}"
        )
