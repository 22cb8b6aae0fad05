"""Fair comparisons of attention variants: train, measure, report.

Names are loaded when they are first used, so that `diffattn compare --help` is instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffattn.compare.arms import ARM_NAMES, DEFAULT_ARMS, Arm, parse_arms
    from diffattn.compare.comparison import compare
    from diffattn.compare.plan import ComparePlan
    from diffattn.compare.pool import StoppedError
    from diffattn.compare.presets import PRESET_NAMES, Preset, get_preset

_HOMES = {
    "arms": ("ARM_NAMES", "DEFAULT_ARMS", "Arm", "parse_arms"),
    "comparison": ("compare",),
    "plan": ("ComparePlan",),
    "pool": ("StoppedError",),
    "presets": ("PRESET_NAMES", "Preset", "get_preset"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ARM_NAMES",
    "DEFAULT_ARMS",
    "PRESET_NAMES",
    "Arm",
    "ComparePlan",
    "Preset",
    "StoppedError",
    "compare",
    "get_preset",
    "parse_arms",
]
