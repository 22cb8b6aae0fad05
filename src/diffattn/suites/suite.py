"""What a suite is: a module that makes items, measures them, and says what it claims."""

import dataclasses
import importlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from diffattn.errors import UserError
from diffattn.report.tables import Figure, Table
from diffattn.suites.claim import Claim
from diffattn.suites.records import Record
from diffattn.suites.subject import Loaded
from diffattn.suites.text import Text

SUITES = ("loss", "retrieval", "icl")


class Item(Protocol):
    """What a suite asks of a model."""

    @property
    def id(self) -> str:
        """The same for the same item of other models and seeds."""
        ...

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids with which it begins."""
        ...


class SuiteSettings(Protocol):
    """A dataclass that checks itself."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Measured = Mapping[str, Sequence[Mapping[str, Record]]]
"""subject -> a mapping from item to record for each of its seeds"""


class Suite(Protocol):
    """The module of a suite.

    `items` are those of one model, whose tokenizer cuts them; `measure` yields a record for each
    in any order. A prompt that does not fit is an error or a flag in its record.
    """

    ABOUT: str
    Settings: type[Any]

    def items(self, settings: Any, loaded: Loaded, text: Text) -> Sequence[Any]:
        """The items, the same for the same settings, text and tokenizer."""
        ...

    def measure(self, settings: Any, loaded: Loaded, items: Sequence[Any]) -> Iterator[Record]:
        """Records of items, one by one."""
        ...

    def claims(self, settings: Any) -> Sequence[Claim]:
        """What it claims; the first claim has the suite's name."""
        ...

    def tables(self, settings: Any, measured: Measured) -> Sequence[Table]:
        """For the page."""
        ...

    def figures(self, settings: Any, measured: Measured) -> Sequence[Figure]:
        """For the page."""
        ...


def suite_named(name: str) -> Suite:
    """The module of a suite.

    Raises:
        UserError: there is none of this name.
    """
    if name not in SUITES:
        raise UserError(f"suite: expected one of {', '.join(SUITES)}, got {name!r}")
    return typing.cast(Suite, importlib.import_module(f"diffattn.suites.{name}"))


def settings_of(name: str, given: Mapping[str, str]) -> Any:
    """Settings of a suite from words of the command line.

    Args:
        name: of the suite.
        given: field -> value as text; lists are separated by commas.

    Raises:
        UserError: an unknown field, or a value of another kind.
    """
    kind = suite_named(name).Settings
    hints, values = typing.get_type_hints(kind), {}
    for key, text in given.items():
        if key not in hints:
            raise UserError(
                f"set: expected one of {', '.join(f'{name}.{field}' for field in hints)}, got "
                f"{name}.{key}"
            )
        try:
            values[key] = _value(hints[key], text)
        except ValueError as error:
            raise UserError(f"{name}.{key}: {error}, got {text!r}") from None
    return kind(**values)


def _value(kind: Any, text: str) -> Any:
    if typing.get_origin(kind) is types.UnionType:
        kinds = [one for one in typing.get_args(kind) if one is not type(None)]
        return None if text == "none" else _value(kinds[0], text)
    if typing.get_origin(kind) is tuple:
        return tuple(_value(typing.get_args(kind)[0], part) for part in text.split(","))
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("expected true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}") from None


def values_of(settings: Any) -> dict[str, Any]:
    """Settings as JSON holds them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(settings).items()
    }
