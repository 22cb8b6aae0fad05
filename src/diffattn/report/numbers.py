"""Prints numbers the way people read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MISSING: Final = "n/a"
SPACE: Final = "\N{NO-BREAK SPACE}"
MINUS: Final = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Scale:
    """How the numbers of one kind are printed.

    Attributes:
        factor: What a number is multiplied by first.
        decimals: The digits after the point.
        suffix: What follows a value.
        difference_unit: The unit of a difference between two values.
        largest: The largest difference that there can be.
    """

    factor: float
    decimals: int
    suffix: str = ""
    difference_unit: str = ""
    largest: float = math.inf

    def value(self, value: object) -> str:
        """Prints a value, or 'n/a' where there is none."""
        text = self.bare(value)
        return text if text == MISSING else with_unit(text, self.suffix)

    def bare(self, value: object) -> str:
        """Prints a value without even a percent sign."""
        amount = number(value)
        if math.isnan(amount):
            return MISSING
        return f"{self.factor * amount:,.{self.decimals}f}".replace("-", MINUS)

    def difference(self, difference: float, *, unit: bool = False) -> str:
        """Prints a difference with its sign; zero has none."""
        if not math.isfinite(difference):
            return MISSING
        scaled = self.factor * difference
        sign = "+" if scaled else ""
        text = f"{scaled:{sign},.{self._digits(scaled)}f}".replace("-", MINUS)
        return with_unit(text, self.difference_unit) if unit else text

    def interval(self, interval: tuple[float, float] | None) -> str:
        """Prints the two ends of the interval of a difference."""
        if interval is None:
            return MISSING
        low, high = (self.factor * end for end in interval)
        digits = self._digits(max(abs(low), abs(high)))
        ends = (f"{end:{'+' if end else ''},.{digits}f}" for end in (low, high))
        return " to ".join(ends).replace("-", MINUS)

    def possible(self, interval: tuple[float, float]) -> tuple[float, float]:
        """Cuts an interval to the differences that there can be."""
        low, high = (max(-self.largest, min(self.largest, end)) for end in interval)
        return low, high

    def smallest(self, size: float) -> str:
        """Prints the smallest difference that could be detected, 'none' where none could."""
        return "none" if size > self.largest else self.size(size)

    def size(self, size: float, *, unit: bool = False) -> str:
        """Prints how large a difference is, without a sign."""
        return self.difference(abs(size), unit=unit).removeprefix("+")

    def _digits(self, scaled: float) -> int:
        """Adds digits where a difference that is not zero would be printed as zero."""
        digits = self.decimals
        while scaled and digits < self.decimals + 3 and abs(scaled) < 0.5 * 10.0**-digits:
            digits += 1
        return digits


def scale_of(unit: str) -> Scale:
    """Says how the numbers of a unit are printed: shares as percentages, for one."""
    if unit == "share":
        return Scale(100.0, 1, "%", "points", largest=1.0)
    return Scale(1.0, 0 if unit == "tokens/s" else 4, difference_unit=unit)


def number(value: object) -> float:
    """Reads a number that may be missing: None, NaN and infinities become NaN."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def with_unit(text: str, unit: str) -> str:
    """Joins a printed number to its unit, if any, so that no line breaks between them."""
    return f"{text}{SPACE}{unit}" if unit else text


def plural(count: int, noun: str, many: str = "") -> str:
    """Prints a count with its noun: '1 seed', '3 seeds', '2 processes'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {many or f'{noun}s'}"


def count_text(value: object) -> str:
    """Prints a large count with three digits and a suffix, such as '1.23 M'."""
    amount = number(value)
    if math.isnan(amount):
        return MISSING
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(amount) >= 0.9995 * size:
            return with_unit(f"{amount / size:#.3g}".rstrip("."), suffix)
    return f"{amount:.0f}"


def bytes_text(value: object) -> str:
    """Prints an amount of memory, such as '1.2 GiB'."""
    amount = number(value)
    if math.isnan(amount):
        return MISSING
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount:.0f} B"


def duration_text(value: object) -> str:
    """Prints a number of seconds, such as '3 min 12 s'."""
    seconds = number(value)
    if math.isnan(seconds):
        return MISSING
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
