"""Intervals by resampling: their coverage, and verdicts that say no more than they know."""

import numpy as np
import pytest

from diffattn.evaluation.bootstrap import bootstrap_interval, verdict_of


@pytest.mark.parametrize(("seeds", "items", "noise"), [(1, 60, 0.0), (3, 40, 0.5), (5, 30, 1.0)])
def test_the_true_mean_lies_inside_about_as_often_as_promised(seeds, items, noise):
    rng, inside = np.random.default_rng(0), 0
    for draw in range(300):
        values = rng.normal(size=(seeds, items)) + rng.normal(size=items)
        values += noise * rng.normal(size=(seeds, 1))
        low, high = bootstrap_interval(values, seed=draw, draws=400)
        inside += low <= 0 <= high
    assert inside >= 0.91 * 300


def test_few_seeds_are_not_believed():
    """Seeds that differ by 1 beside items that agree: three seeds give a wide interval."""
    values = np.array([[0.0], [1.0], [2.0]]).repeat(50, 1)
    low, high = bootstrap_interval(values)
    assert low < -0.5
    assert high > 2.5


def test_items_of_a_cluster_are_drawn_together():
    values = np.random.default_rng(0).normal(size=8).repeat(25)[None]
    alone = bootstrap_interval(values)
    together = bootstrap_interval(values, clusters=np.arange(8).repeat(25).tolist())
    assert np.diff(together) > 3 * np.diff(alone)


def test_one_cluster_or_a_missing_value_gives_no_interval():
    assert bootstrap_interval(np.ones((3, 1))) is None
    assert bootstrap_interval(np.ones((1, 4)), clusters="aaaa") is None
    assert bootstrap_interval(np.array([[1.0, float("nan")]])) is None


def test_the_same_model_twice_is_no_difference_in_every_draw():
    same = np.random.default_rng(0).normal(size=(3, 20))
    for seed in range(200):
        interval = bootstrap_interval(same - same, seed=seed, draws=50)
        assert verdict_of(interval, better="higher", margin=0.0) == "no difference"


@pytest.mark.parametrize(
    ("interval", "better", "expected"),
    [
        ((0.1, 0.3), "higher", "supported"),
        ((0.1, 0.3), "lower", "not supported"),
        ((-0.3, -0.1), "lower", "supported"),
        ((-0.1, 0.3), "higher", "undecided"),
        ((-0.01, 0.02), "higher", "no difference"),
        ((0.005, 0.01), "higher", "no difference"),
        (None, "higher", "undecided"),
    ],
)
def test_verdicts(interval, better, expected):
    assert verdict_of(interval, better=better, margin=0.02) == expected


@pytest.mark.parametrize("values", [np.ones(3), np.ones((0, 3)), np.ones((1, 2, 3))])
def test_other_shapes_are_refused(values):
    with pytest.raises(ValueError, match="values"):
        bootstrap_interval(values)
