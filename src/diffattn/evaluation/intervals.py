"""Differences between arms with intervals that hold jointly.

Every arm is measured on the same seeds and the same held-out items, so x[s, i] of an arm is
paired with the first arm's. The difference of the grand means has the variance

    V = max(V_seed + V_item - V_both, V_seed, V_item)

V_item is the variance of the mean over items, V_both the part of it that V_seed holds already;
neither seeds nor items that agree by chance, as shares of few answers do, make V vanish.
V_seed is the larger of two estimates: that of the pair alone, S - 1 degrees of freedom, and that
of all arms together, (A - 1)(S - 1) degrees of freedom, from what is left of the A x S seed means
after arm and seed effects. The interval is

    difference +- t(1 - (1 - level) / (2 m); (A - 1)(S - 1)) sqrt(V)

with m the number of comparisons in the family (Bonferroni). It assumes that a measure is about
equally noisy in all arms. Where one pair is noisier its own estimate takes over, but not its own
degrees of freedom: what that costs, and what remedies would cost, stands in docs/comparisons.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from diffattn.errors import needs_extra

Verdict = Literal["better", "worse", "no difference"]

ONE_SEED = "one seed gives no interval"
NOT_FINITE = "a value is missing or infinite"


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm against the first arm in one measure."""

    arm: str
    difference: float
    """Mean of the arm minus mean of the first arm."""
    interval: tuple[float, float] | None
    """None where the noise between seeds is unknown; `reason` says why."""
    verdict: Verdict
    reason: str | None = None
    """Why there is no interval; None where there is one."""

    @property
    def smallest_detectable(self) -> float | None:
        """Half the interval's width: smaller differences could not have been told from none.

        None without an interval, and where nothing varied, as when every answer is wrong.
        """
        half = 0.0 if self.interval is None else (self.interval[1] - self.interval[0]) / 2
        return half or None


def compare_to_first(
    values: Mapping[str, np.ndarray],
    *,
    better: Literal["lower", "higher"],
    comparisons: int,
    level: float = 0.95,
) -> list[Comparison]:
    """Compare each arm with the first in one measure.

    Args:
        values: for each arm an array [seeds, items] of the measure; the same seeds and items.
        better: which direction is an improvement.
        comparisons: m, all comparisons that are to hold jointly.
        level: joint confidence level.

    Returns:
        One comparison for each arm but the first. The verdict is "no difference" where the
        interval contains 0 or there is none.

    Raises:
        ValueError: no arms, arrays that are empty or differ in shape, an unknown direction, or
            fewer than one comparison.
    """
    arrays = {arm: np.asarray(array, dtype=float) for arm, array in values.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != 2 or 0 in shape:
        raise ValueError(f"values: expected one shape [seeds, items], got {sorted(shapes)}")
    if better not in ("lower", "higher"):
        raise ValueError(f"better: expected 'lower' or 'higher', got {better!r}")
    if comparisons < 1:
        raise ValueError(f"comparisons: expected at least 1, got {comparisons}")
    first, *others = arrays
    # an arm that diverged must not decide over the noise of the others
    pooled, degrees = _pooled_seed_variance([a for a in arrays.values() if np.isfinite(a).all()])
    result = []
    for arm in others:
        paired = arrays[arm] - arrays[first]
        difference = float(paired.mean())
        interval, reason = None, None
        if not np.isfinite(paired).all():
            reason = NOT_FINITE
        elif len(paired) == 1:
            reason = ONE_SEED
        else:
            half = _quantile(1 - (1 - level) / (2 * comparisons), degrees) * np.sqrt(
                _variance(paired, pooled)
            )
            interval = (difference - float(half), difference + float(half))
        result.append(Comparison(arm, difference, interval, _verdict(interval, better), reason))
    return result


def _verdict(interval: tuple[float, float] | None, better: Literal["lower", "higher"]) -> Verdict:
    if interval is None or interval[0] <= 0.0 <= interval[1]:
        return "no difference"
    return "better" if (interval[0] > 0) == (better == "higher") else "worse"


def _pooled_seed_variance(arrays: list[np.ndarray]) -> tuple[float, int]:
    """Seed variance of the mean of a difference, from all arms; its degrees of freedom."""
    if len(arrays) < 2 or len(arrays[0]) < 2:
        return float("nan"), 0
    means = np.stack([array.mean(axis=1) for array in arrays])  # [A, S]
    arms, seeds = means.shape
    degrees = (arms - 1) * (seeds - 1)
    residual = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
    return 2 * float(np.square(residual).sum()) / degrees / seeds, degrees


def _variance(paired: np.ndarray, pooled: float) -> float:
    """Variance of the grand mean of paired differences [seeds, items]."""
    seeds, items = paired.shape
    by_seed, by_item = paired.mean(axis=1), paired.mean(axis=0)
    seed_part = max(pooled, float(by_seed.var(ddof=1)) / seeds)
    if items == 1:
        return seed_part
    residual = paired - by_seed[:, None] - by_item + paired.mean()
    both_part = float(np.square(residual).sum()) / ((seeds - 1) * (items - 1)) / (seeds * items)
    item_part = float(by_item.var(ddof=1)) / items
    return max(seed_part + item_part - both_part, seed_part, item_part)


def _quantile(probability: float, degrees: int) -> float:
    with needs_extra("the interval of a difference", "eval"):
        from scipy.special import stdtrit
    return float(stdtrit(degrees, probability))


def paired_interval(differences: np.ndarray, *, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of paired differences over items, of one run on each side.

        mean +- t(1 - (1 - level) / 2; n - 1) sd / sqrt(n)

    It tells how much other items would change the mean, not how much other seeds would.

    Args:
        differences: [n] of items measured on both sides, n at least 2.
        level: confidence level.
    """
    values = np.asarray(differences, dtype=float)
    half = _quantile(1 - (1 - level) / 2, len(values) - 1) * values.std(ddof=1)
    half /= np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)
