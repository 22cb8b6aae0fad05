"""Random places of which no two are neighbours."""

from __future__ import annotations

from math import comb

import numpy as np

from diffattn.data.packing import IntArray


def draw_places(
    rng: np.random.Generator, places: int, needles: int, depth: float | None
) -> IntArray:
    """Draw separate places for needles, the first of them at a depth.

    Args:
        rng: drawn from.
        places: to choose from, at least `2 * needles`.
        needles: places wanted.
        depth: of the first, from 0 to 1; None means that it is drawn like the others.

    Returns:
        [needles] places, no two of them neighbours, in random order after the first.
    """
    if depth is None:
        return rng.permutation(_draw_separate(rng, places, needles))
    first = int(depth * (places - 1) + 0.5)
    before, after = max(first - 1, 0), max(places - first - 2, 0)
    arrangements = [
        _count_separate(before, number) * _count_separate(after, needles - 1 - number)
        for number in range(needles)
    ]
    total = sum(arrangements)
    number = int(rng.choice(needles, p=[count / total for count in arrangements]))
    left = _draw_separate(rng, before, number)
    right = first + 2 + _draw_separate(rng, after, needles - 1 - number)
    return np.concatenate([[first], rng.permutation(np.concatenate([left, right]))])


def _count_separate(places: int, count: int) -> int:
    """Count the ways to choose places of which no two are neighbours."""
    return comb(places - count + 1, count) if count <= places else 0


def _draw_separate(rng: np.random.Generator, places: int, count: int) -> IntArray:
    """Draw places of which no two are neighbours, all choices equally likely, in order."""
    gaps = rng.choice(places - count + 1, size=count, replace=False)
    return np.sort(gaps) + np.arange(count)
