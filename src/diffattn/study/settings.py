"""What a study is made of."""

import math
from dataclasses import dataclass

from diffattn.errors import UserError
from diffattn.study.arms import ARMS, CLAIM, arm_named


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Settings of a study; all of its arms share them.

    Args:
        model: folder of the base model, or "smollm2" as fetched.
        data: text to adapt to; None means the bundled speeches.
        outside: text that tells what is forgotten; None means bundled questions to a bank.
        arms: names, `diffattn.study.arms.ARMS` lists them.
        seeds: of DEX and attention alone, whose difference is the claim.
        other_seeds: of the other arms.
        steps: optimizer steps of a run.
        length: tokens of a window.
        rows: windows of one optimizer step.
        rates: each arm's usual learning rate is tried at these multiples; with one, none is tried.
        tuning_steps: optimizer steps of a trial.
        tuning_windows: windows of held-out text, apart from the measured ones, that judge trials.
        ramp_steps: T of lam's schedule in runs; None means half the steps; trials scale it.
        lam_rate: the learning rate of lam as a multiple of the others'.
        heads: "entropy", "importance", "all", or the path of a plan.
        bf16: train under bf16 autocast, weights in fp32; measures are always in fp32.
        heldout_windows: windows of held-out text that are measured.
        outside_windows: windows of the text outside that are measured.
        items: texts with needles, and lists of examples, that are measured.
        context: tokens of each of these.
    """

    model: str
    data: str | None = None
    outside: str | None = None
    arms: tuple[str, ...] = tuple(arm.name for arm in ARMS)
    seeds: int = 3
    other_seeds: int = 1
    steps: int = 200
    length: int = 1024
    rows: int = 1
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    tuning_steps: int = 24
    tuning_windows: int = 6
    ramp_steps: int | None = None
    lam_rate: float = 10.0
    heads: str = "entropy"
    bf16: bool = False
    heldout_windows: int = 24
    outside_windows: int = 12
    items: int = 12
    context: int = 1024

    def __post_init__(self) -> None:
        for name in (
            *("seeds", "other_seeds", "steps", "rows", "tuning_steps", "tuning_windows"),
            *("heldout_windows", "outside_windows", "items"),
        ):
            least = 2 if name in ("heldout_windows", "outside_windows", "items") else 1
            if getattr(self, name) < least:
                raise UserError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            raise UserError(f"rates: expected multiples above 0, got {list(self.rates)}")
        if len({f"{rate:g}" for rate in self.rates}) != len(self.rates):
            raise UserError(f"rates: expected different multiples, got {list(self.rates)}")
        if self.ramp_steps is not None and self.ramp_steps < 1:
            raise UserError(f"ramp_steps: expected at least 1, got {self.ramp_steps}")
        if not 0 < self.lam_rate < math.inf:
            raise UserError(f"lam_rate: expected a number above 0, got {self.lam_rate}")
        for name in self.arms:
            arm_named(name)
        if len(set(self.arms)) != len(self.arms):
            raise UserError(f"arms: expected different names, got {', '.join(self.arms)}")
        if missing := [name for name in CLAIM if name not in self.arms]:
            raise UserError(
                f"arms: expected {' and '.join(CLAIM)} among them, whose difference is the claim; "
                f"lacks {missing[0]}"
            )

    def seeds_of(self, arm: str) -> range:
        """The seeds of an arm; a base model has one, for nothing in it is drawn."""
        if arm_named(arm).rate is None or arm_named(arm).like is not None:
            return range(1)
        return range(self.seeds if arm in CLAIM else self.other_seeds)
