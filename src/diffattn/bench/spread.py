"""Medians and quartiles, of times and of the ratios of times taken in the same turn."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """The middle half of some numbers."""

    low: float
    """lower quartile"""
    middle: float
    """median"""
    high: float
    """upper quartile"""

    def text(self, digits: int = 2) -> str:
        """As tables print it."""
        return f"{self.middle:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def spread(numbers: Sequence[float]) -> Spread:
    """The spread of numbers, at least one."""
    return Spread(*(float(value) for value in np.quantile(numbers, [0.25, 0.5, 0.75])))


def ratio(times: Sequence[float], base: Sequence[float] | None) -> Spread | None:
    """The spread of times over those of another side, turn by turn; None where there is none."""
    if base is None:
        return None
    return spread([a / b for a, b in zip(times, base, strict=True)])
