"""The interval of a share of answers, which never vanishes."""

import math

from diffattn.errors import needs_extra


def proportion_interval(right: float, count: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share.

        (p + z^2 / 2 n +- z sqrt(p (1 - p) / n + z^2 / 4 n^2)) / (1 + z^2 / n)

    Args:
        right: answers that are right; parts of answers count as parts.
        count: n, at least 1.
        level: confidence level.

    Returns:
        Both ends; 20 of 20 gives 0.839 and 1.

    Source: Wilson, Journal of the American Statistical Association 22 (1927).
    """
    if not 0 <= right <= count or count < 1:
        raise ValueError(f"right: expected 0 to count, and count above 0, got {right} of {count}")
    with needs_extra("the interval of a share", "eval"):
        from scipy.special import ndtri
    z, share = float(ndtri((1 + level) / 2)), right / count
    middle = share + z * z / 2 / count
    half = z * math.sqrt(share * (1 - share) / count + (z / 2 / count) ** 2)
    scale = 1 + z * z / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
