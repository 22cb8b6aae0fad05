"""What a DEX adaptation is: which heads, which lam, what trains."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from diffattn.errors import UserError
from diffattn.ops import lambda_init

Lam = Literal["scheduled", "pinned"]
Trains = Literal["all", "extension", "attention"]
Heads = dict[int, list[int]]
"""selected heads of each layer; a layer that is not named has none"""


@dataclass(frozen=True, kw_only=True)
class DexConfig:
    """Settings of an adaptation.

        O'_h = O_h - lam(t) O_h W_D  for selected heads h, just before the output projection

    Args:
        heads: layer -> selected heads; None selects all heads.
        ramp_steps: T of the schedule of lam, in optimizer steps.
        lam: "scheduled" (the paper's Eq. 4) or "pinned" at lambda_init, a control.
        sign: -1 subtracts (DEX), +1 adds, a control.
        per_head: a matrix W_D and a lambda_learn for each selected head instead of one a layer.
        trains: "all" (W_K, W_V, W_O and the extension), "extension" or "attention".
        init_std: standard deviation of W_D's normal initialisation in units of 1 / sqrt(d_v);
            0 starts from zeros.

    Raises:
        UserError: a value is out of range, or nothing could ever train: lam and W_D both start at
            zero and stay there.

    Source: Kong et al., arXiv 2505.16333, Eqs. 3 to 5.
    Differs: the paper's initialisation of W_D is not known; ours is that of a linear layer,
        normal with the variance 1 / (3 d_v).
    """

    heads: Heads | None = None
    ramp_steps: int
    lam: Lam = "scheduled"
    sign: int = -1
    per_head: bool = False
    trains: Trains = "all"
    init_std: float = field(default=3**-0.5)

    def __post_init__(self) -> None:
        for name, choices in (("lam", get_args(Lam)), ("trains", get_args(Trains))):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.sign not in (-1, 1):
            raise UserError(f"sign: expected -1 or 1, got {self.sign!r}")
        is_count = isinstance(self.ramp_steps, int) and not isinstance(self.ramp_steps, bool)
        if not is_count or self.ramp_steps < 0:
            raise UserError(f"ramp_steps: expected a count from 0, got {self.ramp_steps!r}")
        if not self.init_std >= 0:
            raise UserError(f"init_std: expected a number from 0, got {self.init_std!r}")
        if self.trains != "attention" and self.heads is not None and not any(self.heads.values()):
            raise UserError("heads: expected at least one selected head, got none")
        if self.is_stationary:
            raise UserError(
                "ramp_steps: with T = 0 and W_D = 0, lam and W_D have no gradient and would never "
                "train; give ramp_steps or init_std above 0"
            )

    @property
    def is_stationary(self) -> bool:
        """Whether the extension starts where all its gradients vanish."""
        at_zero = self.ramp_steps == 0 and self.lam == "scheduled" and self.init_std == 0
        return at_zero and self.trains != "attention"

    def selected(self, layer: int, num_heads: int) -> list[int]:
        """Selected heads of a layer, none for "attention"."""
        if self.trains == "attention":
            return []
        return list(range(num_heads)) if self.heads is None else sorted(self.heads.get(layer, []))

    def start(self, layer: int) -> float:
        """lambda_init of a layer: 0.8 - 0.6 exp(-0.3 layer)."""
        return lambda_init(layer)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DexConfig":
        """The configuration in a dictionary that was read from JSON.

        Raises:
            UserError: names or values are not those of a configuration.
        """
        known = {entry.name for entry in fields(cls)}
        if unknown := set(values) - known or {"ramp_steps"} - set(values):
            raise UserError(f"config: expected the fields of DexConfig, got {sorted(unknown)}")
        heads = values.get("heads")
        if heads is not None:
            heads = {int(layer): list(chosen) for layer, chosen in heads.items()}
        return cls(**{**values, "heads": heads})
