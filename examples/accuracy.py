"""Accuracy on held-out items with its Wilson interval."""

import math


def wilson_interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a proportion that stays inside [0, 1] where every answer is right.

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),  p = right / n

    Args:
        right: number of right answers.
        total: n, number of answers.
        z: quantile of the normal distribution; 1.96 for 95 %.

    Returns:
        Lower and upper bound.

    Example:
        >>> [round(bound, 3) for bound in wilson_interval(20, 20)]
        [0.839, 1.0]

    Source: Wilson, Journal of the American Statistical Association 22, 1927.
    """
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def describe(right: int, total: int, what: str) -> str:
    """One line: the share, its interval, the number of items."""
    low, high = wilson_interval(right, total)
    return f"{right / total:.1%} of {total:,} {what} right (95 % interval {low:.1%} to {high:.1%})"
