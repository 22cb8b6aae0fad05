"""Our configuration from config.json, each value of the type that its field declares."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin

from diffattn.errors import UserError
from diffattn.models.configuration_diff import DiffTransformerConfig
from diffattn.models.convert.config_errors import reading_config

TYPES: dict[str, Any] = {
    **DiffTransformerConfig.__annotations__,
    "rope_parameters": dict | None,
    "dtype": str | None,
}


def our_config(config: Mapping[str, Any]) -> DiffTransformerConfig:
    """Configuration of `DiffTransformerForCausalLM`.

    Args:
        config: config.json.

    Raises:
        UserError: a value is of another type, or has no meaning; the message names it.
    """
    for name, value in config.items():
        if name in TYPES and not _fits(value, TYPES[name]):
            kind = TYPES[name]
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise UserError(f"in: config.json: {name}: expected {expected}, got {value!r}")
    with reading_config():
        return DiffTransformerConfig(**config)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, *get_args(kind)) for each in value)
    if kind in (int, float):  # a bool is an int, and JSON writes 1.0 as 1
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)
