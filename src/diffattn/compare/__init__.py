"""Fair comparisons of attention variants: train, measure, report."""

from diffattn.compare.arms import ARM_NAMES, DEFAULT_ARMS, Arm, parse_arms
from diffattn.compare.comparison import compare
from diffattn.compare.plan import ComparePlan
from diffattn.compare.pool import StoppedError
from diffattn.compare.presets import PRESET_NAMES, Preset, get_preset

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
