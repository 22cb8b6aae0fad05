"""How much accuracy and answers move with the order of demonstrations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class OrderSpread:
    """Accuracy over orders of the same demonstrations.

    Args:
        mean: over orders.
        worst: lowest of an order.
        margin: best minus worst.
        deviation: standard deviation over orders.
        floor: margin to expect if each order were a draw of new test items of this mean.
        floor_same: margin to expect if orders changed each answer by itself, on these items.
    """

    mean: float
    worst: float
    margin: float
    deviation: float
    floor: float
    floor_same: float


def order_spread(right: np.ndarray) -> OrderSpread:
    """Spread of accuracy over orders.

        floor      = d_S sqrt(p (1 - p) / n)
        floor_same = d_S sqrt(mean_i p_i (1 - p_i) S / (S - 1) / n)

    with d_S the expected range of S standard normal draws.

    Args:
        right: [orders, items] whether each answer is right; at least two orders.

    Raises:
        ValueError: another shape.
    """
    right = np.asarray(right, dtype=float)
    if right.ndim != 2 or right.shape[0] < 2 or not right.size:
        raise ValueError(f"right: expected [2 orders or more, items], got shape {right.shape}")
    orders, items = right.shape
    accuracy, of_item = right.mean(axis=1), right.mean(axis=0)
    mean, width = float(accuracy.mean()), expected_range(orders)
    within = float((of_item * (1 - of_item)).mean()) * orders / (orders - 1)
    return OrderSpread(
        mean=mean,
        worst=float(accuracy.min()),
        margin=float(accuracy.max() - accuracy.min()),
        deviation=float(accuracy.std(ddof=1)),
        floor=width * math.sqrt(max(mean * (1 - mean), 0.0) / items),
        floor_same=width * math.sqrt(within / items),
    )


def expected_range(draws: int) -> float:
    """Expected distance of the largest from the smallest of standard normal draws."""
    x = np.linspace(-9, 9, 4001)
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])
    return float(np.trapezoid(1 - below**draws - (1 - below) ** draws, x))


def pair_agreement(answers: Sequence[object]) -> float:
    """Share of pairs of orders that give an item the same answer (Fleiss' P_i).

    Args:
        answers: of each order; at least two.
    """
    pairs = list(combinations(answers, 2))
    return sum(a == b for a, b in pairs) / len(pairs)
