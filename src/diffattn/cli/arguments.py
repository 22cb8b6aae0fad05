"""What command lines share: the parser, kinds of values, lines of progress."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import NoReturn

Verbs = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        self.exit(2, f"{self.prog}: {message} ('{self.prog} --help' lists what there is)\n")


def count(text: str) -> int:
    """A whole number, also as 1_000_000, 1e6, 500k, 2M or 1.5G."""
    size = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}.get(text[-1:].lower(), 0)
    try:
        value = Decimal(text[:-1] if size else text)
        # an exponent without end would fill the memory with digits
        if value.is_finite() and abs(value.adjusted()) < 100:
            count = Fraction(value) * 10**size
            if count.denominator == 1:
                return int(count)
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(
        f"expected a whole number such as 2000000, 2e6 or 2M, got {text!r}"
    )


def memory(text: str) -> int:
    """Bytes, as 4GB, 500MB or 1.5GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(i?)B", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, got {text!r}")
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** ("KMGT".index(match[2].upper()) + 1))


def names(text: str) -> tuple[str, ...]:
    """Names that commas separate."""
    return tuple(name.strip() for name in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers that commas separate."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, as in 0.3,1,3, got {text!r}"
        ) from None


def listed(pairs: Sequence[tuple[str, str]]) -> str:
    """Names with what they mean, one a line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"  {name:{width}}  {about}" for name, about in pairs)


def again() -> str:
    """The command of this process, so that it goes on with its folder."""
    given = sys.argv[1:]
    return shlex.join(["diffattn", *given, *([] if "--resume" in given else ["--resume"])])


def said(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr)
