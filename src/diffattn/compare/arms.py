"""The architectures that a comparison can train."""

import difflib
from dataclasses import dataclass, replace

from diffattn.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One trained architecture of a comparison."""

    name: str
    """Unique in the comparison; also the name of its folder."""
    label: str
    """For people."""
    about: str
    """Its heads, where a Transformer of the same width has N heads of D."""
    attention: str
    """Kind of attention, as in `DiffTransformerConfig`."""
    head_divisor: int = 1
    """Heads of the Transformer are divided by this, their width multiplied."""
    lr_factor: float = 1.0
    """Factor of the learning rate."""
    own_start: bool = False
    """Whether starting weights are drawn anew instead of shared with the other arms."""


_ARMS = {
    arm.name: arm
    for arm in (
        Arm(
            name="transformer",
            label="Transformer",
            about="softmax attention, N heads of D",
            attention="softmax",
        ),
        Arm(
            name="transformer-wide",
            label="Transformer, half the heads",
            about="softmax attention, N/2 heads of 2 D",
            attention="softmax",
            head_divisor=2,
        ),
        Arm(
            name="diff-v1",
            label="Diff V1",
            about="differential attention, N/2 pairs of D with values of 2 D (arXiv 2410.05258)",
            attention="v1",
        ),
        Arm(
            name="diff-v2",
            label="Diff V2",
            about="differential attention, N outputs, 2 N queries of D on N keys (authors, 2026)",
            attention="v2",
        ),
        Arm(
            name="diff-grouped",
            label="Diff grouped 2:1",
            about="as diff-v1, one noise head for two signal heads (arXiv 2510.06949)",
            attention="grouped",
        ),
    )
}
_ALIASES = {
    "softmax": "transformer",
    "wide": "transformer-wide",
    "v1": "diff-v1",
    "v2": "diff-v2",
    "grouped": "diff-grouped",
}

DEFAULT_ARMS = "transformer,transformer-wide,diff-v1,diff-v2"
ARMS = tuple(_ARMS.values())
ARM_NAMES = tuple(_ARMS)


def parse_arms(text: str) -> list[Arm]:
    """Read a list of arms.

    Args:
        text: names separated by commas; the first is what the others are compared with. A name
            may carry a factor of its learning rate, as in `transformer:lr=0.1`. An arm that is
            named twice gets its own starting weights the second time.

    Returns:
        The arms, at least two.

    Raises:
        UserError: an unknown name (near names are suggested), a bad factor, or fewer than two.
    """
    arms: list[Arm] = []
    for entry in (part.strip() for part in text.split(",")):
        arm = _parse_arm(entry)
        repeats = sum(other.name.split("#")[0] == arm.name for other in arms)
        if repeats:
            arm = replace(
                arm,
                name=f"{arm.name}#{repeats + 1}",
                label=f"{arm.label} ({repeats + 1})",
                own_start=True,
            )
        arms.append(arm)
    if len(arms) < 2:
        raise UserError(f"arms: expected at least two, separated by commas, got {text!r}")
    return arms


def _parse_arm(entry: str) -> Arm:
    name, _, option = entry.partition(":")
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in _ARMS:
        known = (*_ARMS, *_ALIASES)
        near = difflib.get_close_matches(key, known, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"arms: expected one of {', '.join(_ARMS)}, got {entry!r}{hint}")
    arm = _ARMS[key]
    if not option:
        return arm
    setting, _, value = option.partition("=")
    try:
        factor = float(value)
    except ValueError:
        factor = float("nan")
    if setting.strip() != "lr" or not 0 < factor < float("inf"):
        raise UserError(f"arms: expected {name}:lr=FACTOR with a factor above 0, got {entry!r}")
    return replace(
        arm,
        name=f"{arm.name}@lr{factor:g}",
        label=f"{arm.label}, lr x {factor:g}",
        lr_factor=factor,
    )
