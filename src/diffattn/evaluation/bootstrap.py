"""Intervals by resampling items and seeds, and the verdict that follows from one.

A measure is x[s, i] for seed s and item i. With paired differences d = x_second - x_first the mean
is resampled in two parts, each over the mean of the other axis,

    draw = (mean of resampled items) + w_S (mean of resampled seed means - mean(d))

Items that belong together (windows of a document) are resampled whole. A bootstrap over few seeds
believes them too much; w_S = sqrt(S / (S - 1)) t(0.975; S - 1) / 1.96 undoes that, and with one
seed there is no first part: the interval then says nothing of other seeds. Adding both parts
counts noise of single answers twice, so the interval is wide rather than narrow.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from diffattn.errors import needs_extra

Verdict = Literal["supported", "not supported", "undecided", "no difference"]
DRAWS = 2000
_LEVEL = 0.95


def bootstrap_interval(
    values: np.ndarray,
    *,
    clusters: Sequence[Hashable] | None = None,
    careful: float = 0.0,
    seed: int = 0,
    draws: int = DRAWS,
) -> tuple[float, float] | None:
    """The 95 % interval of a mean.

    Args:
        values: [seeds, items] of a measure, or of paired differences in it.
        clusters: [items] what each item belongs to; None means that every item stands alone.
        careful: size of a difference that two items more would have, one in each direction; 1 for
            shares of right answers, which may agree on few items by chance.
        seed: of the draws; the same one gives the same interval.
        draws: number of them.

    Returns:
        Both ends; None where there are fewer than two clusters, or a value is not finite.

    Raises:
        ValueError: `values` has another number of axes, nothing in it, or another number of items
            than `clusters`.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values: expected [seeds, items], got shape {values.shape}")
    seeds, items = values.shape
    if clusters is None:
        clusters = range(items)
    if len(clusters) != items:
        raise ValueError(f"clusters: expected one for each of {items} items, got {len(clusters)}")
    found = list(dict.fromkeys(clusters))
    if len(found) < 2 or not np.isfinite(values).all():
        return None
    mean, by_item, by_seed = values.mean(), values.mean(axis=0), values.mean(axis=1)
    rng = np.random.default_rng(seed)
    member = np.array([found.index(cluster) for cluster in clusters])
    sums = np.bincount(member, weights=by_item - mean, minlength=len(found))
    sizes = np.bincount(member, minlength=len(found))
    if careful:
        sums = np.append(sums, [careful, -careful])
        sizes = np.append(sizes, [1, 1])
    # how often each cluster is drawn, [draws, clusters]
    times = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=draws)
    drawn = mean + times @ sums / (times @ sizes)
    if seeds > 1:
        of_seeds = by_seed[rng.integers(seeds, size=(draws, seeds))].mean(axis=1)
        drawn = drawn + _widening(seeds) * (of_seeds - mean)
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def _widening(seeds: int) -> float:
    with needs_extra("an interval over seeds", "eval"):
        from scipy.special import ndtri, stdtrit
    upper = (1 + _LEVEL) / 2
    return float(np.sqrt(seeds / (seeds - 1)) * stdtrit(seeds - 1, upper) / ndtri(upper))


def verdict_of(
    interval: tuple[float, float] | None, *, better: Literal["lower", "higher"], margin: float
) -> Verdict:
    """What an interval of a difference says of the claim that the second one is better.

    Args:
        interval: of second minus first; None decides nothing.
        better: which direction is an improvement.
        margin: smallest difference worth naming; an interval within it is "no difference".
    """
    if interval is None:
        return "undecided"
    low, high = interval
    if -margin <= low and high <= margin:
        return "no difference"
    if low <= 0 <= high:
        return "undecided"
    return "supported" if (low > 0) == (better == "higher") else "not supported"
