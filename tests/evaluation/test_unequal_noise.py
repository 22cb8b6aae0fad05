"""Intervals where one arm is noisier than the others: what they cost, what remedies would.

`python -m pytest -m slow -s tests/evaluation/test_unequal_noise.py` prints the table of
docs/comparisons.md. Seeds alone make noise here, in all of 14 independent measures alike: worse
than a comparison whose recall measures depend on one another.
"""

import numpy as np
import pytest

pytest.importorskip("scipy", reason="intervals need the extra eval")

from scipy.special import stdtrit

from diffattn.evaluation import compare_to_first

MEASURES, ARMS, FAMILIES = 14, 4, 1000
PROBABILITY = 1 - 0.05 / (2 * MEASURES * (ARMS - 1))


def draw(rng, seeds, noise):
    """Seed means [families x measures, arms, seeds] without any true difference."""
    shape = FAMILIES * MEASURES, ARMS, seeds
    return rng.normal(size=shape) * np.asarray(noise)[:, None]


def as_here(x):
    """Halves of the intervals that compare_to_first gives."""
    halves = []
    for means in x:
        values = {f"{arm}": of_arm[:, None] for arm, of_arm in enumerate(means)}
        told = compare_to_first(values, better="lower", comparisons=MEASURES * (ARMS - 1))
        halves.append([comparison.smallest_detectable for comparison in told])
    return np.array(halves)


def paired_t(x):
    """Each pair on its own: exact, whatever the noise of the arms."""
    seeds = x.shape[2]
    pair = (x[:, 1:] - x[:, :1]).var(axis=2, ddof=1) / seeds
    return stdtrit(seeds - 1, PROBABILITY) * np.sqrt(pair)


def welch(x):
    """Two unpaired variances with Satterthwaite's degrees of freedom, as in Games and Howell."""
    seeds = x.shape[2]
    arm = x.var(axis=2, ddof=1) / seeds
    both = arm[:, 1:] + arm[:, :1]
    degrees = both**2 * (seeds - 1) / (arm[:, 1:] ** 2 + arm[:, :1] ** 2)
    return stdtrit(degrees, PROBABILITY) * np.sqrt(both)


def adaptive(x, here):
    """As here, with degrees of freedom that fall to S - 1 as one of both arms makes all noise."""
    seeds = x.shape[2]
    residual = x - x.mean(1, keepdims=True) - x.mean(2, keepdims=True)
    residual += x.mean((1, 2), keepdims=True)
    share = np.square(residual).sum(2) * ARMS / (ARMS - 1)
    share /= np.square(residual).sum((1, 2))[:, None]
    weight = np.clip((np.maximum(share[:, 1:], share[:, :1]) - 0.4) / 0.6, 0, 1)
    many = (ARMS - 1) * (seeds - 1)
    degrees = 1 / ((1 - weight) / many + weight / (seeds - 1))
    return here * stdtrit(degrees, PROBABILITY) / stdtrit(many, PROBABILITY)


def halves(x):
    here = as_here(x)
    return {
        "here": here,
        "adaptive": adaptive(x, here),
        "Welch": welch(x),
        "paired t": paired_t(x),
    }


def family_error(x, half):
    """Percentage of families in which any interval misses the true difference, zero."""
    missed = np.abs((x[:, 1:] - x[:, :1]).mean(axis=2)) > half
    return 100 * missed.reshape(FAMILIES, -1).any(axis=1).mean()


def power(x, by_method):
    """Percentage of differences found, of the size of which "here" finds 80 %."""
    difference = (x[:, 1:] - x[:, :1]).mean(axis=2)
    size = np.quantile(by_method["here"] - difference, 0.8)
    return {name: 100 * (difference + size > half).mean() for name, half in by_method.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_no_remedy_is_both_exact_and_cheap(seeds):
    rng = np.random.default_rng(0)
    errors = {}
    for place, ratio in [(1, 1), *((place, ratio) for place in (1, 0) for ratio in (2, 3, 4))]:
        noise = np.ones(ARMS)
        noise[place] = ratio
        x = draw(rng, seeds, noise)
        by_method = halves(x)
        errors[place, ratio] = {name: family_error(x, half) for name, half in by_method.items()}
        if ratio == 1:
            found = power(x, by_method)
            print(f"\n{seeds} seeds; power {row(found)}")
        print(f"{'first' if place == 0 else 'other'} arm x {ratio}: {row(errors[place, ratio])}")
    # three standard errors of 5 % are 2 points
    assert errors[1, 1]["here"] <= 7.0
    assert all(error["paired t"] <= 7.0 for error in errors.values())
    # what docs/comparisons.md says of the intervals in use
    assert 8.0 <= errors[1, 3]["here"] <= 14.0
    assert 12.0 <= errors[0, 3]["here"] <= 19.0
    for name in ("adaptive", "Welch", "paired t"):
        exact = max(errors[1, 3][name], errors[0, 3][name]) <= 7.0
        assert not (exact and found[name] > 70.0), f"{name} would be better: use it"


def row(numbers):
    return ", ".join(f"{name} {number:.1f} %" for name, number in numbers.items())
