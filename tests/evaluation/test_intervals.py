"""Intervals: coverage, verdicts, degenerate input."""

import numpy as np
import pytest

pytest.importorskip("scipy", reason="intervals need the extra eval")

from diffattn.evaluation import compare_to_first


def noisy(rng, arms, seeds, items, shift=0.0):
    base = rng.normal(size=(1, items))
    values = {
        f"arm{index}": base
        + 0.3 * rng.normal(size=(seeds, 1))
        + 0.5 * rng.normal(size=(seeds, items))
        for index in range(arms)
    }
    values["arm1"] = values["arm1"] + shift
    return values


def test_the_family_errs_in_at_most_five_percent():
    rng = np.random.default_rng(0)
    measures, trials, false = 10, 300, 0
    for _ in range(trials):
        verdicts = [
            comparison.verdict
            for _ in range(measures)
            for comparison in compare_to_first(
                noisy(rng, 4, 3, 12), better="lower", comparisons=3 * measures
            )
        ]
        false += any(verdict != "no difference" for verdict in verdicts)
    # 5 % of 300 is 15; three standard errors above it are 26
    assert false <= 26


def test_a_single_interval_covers_at_its_level():
    # seeds alone make noise here, so coverage must be neither below 95 % nor far above
    rng = np.random.default_rng(1)
    trials, covered = 1000, 0
    for _ in range(trials):
        values = {"a": rng.normal(size=(3, 1)), "b": rng.normal(size=(3, 1)) + 0.7}
        (comparison,) = compare_to_first(values, better="higher", comparisons=1)
        covered += comparison.interval[0] <= 0.7 <= comparison.interval[1]
    assert 0.93 <= covered / trials <= 0.97


@pytest.mark.parametrize(
    ("shift", "better", "verdict"),
    [(5.0, "lower", "worse"), (5.0, "higher", "better"), (-5.0, "lower", "better")],
)
def test_a_large_difference_is_found(shift, better, verdict):
    values = noisy(np.random.default_rng(2), 4, 3, 12, shift)
    found = compare_to_first(values, better=better, comparisons=30)[0]
    assert found.verdict == verdict
    assert found.interval[0] <= found.difference <= found.interval[1]
    assert found.smallest_detectable < 5.0


def test_the_same_numbers_twice_are_no_difference():
    values = noisy(np.random.default_rng(3), 2, 3, 12)
    values["arm1"] = values["arm0"]
    (comparison,) = compare_to_first(values, better="lower", comparisons=1)
    assert comparison.difference == 0.0
    assert comparison.verdict == "no difference"


def test_one_seed_has_no_interval():
    values = noisy(np.random.default_rng(4), 3, 1, 12, 50.0)
    for comparison in compare_to_first(values, better="lower", comparisons=2):
        assert comparison.interval is None
        assert comparison.smallest_detectable is None
        assert comparison.verdict == "no difference"
        assert comparison.reason == "one seed gives no interval"


def test_more_comparisons_widen_the_interval():
    values = noisy(np.random.default_rng(5), 2, 3, 12)
    widths = [
        compare_to_first(values, better="lower", comparisons=count)[0].smallest_detectable
        for count in (1, 10, 100)
    ]
    assert widths == sorted(widths)
    assert widths[0] < widths[2]


def test_few_items_widen_the_interval():
    # the same seed noise, but the mean over items is known less well from fewer of them
    rng = np.random.default_rng(6)
    many = {arm: rng.normal(size=(3, 1)) * 0.01 + rng.normal(size=(1, 400)) for arm in "ab"}
    few = {arm: values[:, :8] for arm, values in many.items()}
    wide, narrow = (
        compare_to_first(values, better="lower", comparisons=1)[0].smallest_detectable
        for values in (few, many)
    )
    assert wide > 3 * narrow


def test_arms_of_unequal_shape_are_refused():
    with pytest.raises(ValueError, match=r"values: expected one shape"):
        compare_to_first(
            {"a": np.zeros((3, 4)), "b": np.zeros((3, 5))}, better="lower", comparisons=1
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_arm_that_diverged_decides_nothing_for_the_others(bad):
    values = noisy(np.random.default_rng(7), 3, 3, 12)
    pair = {arm: values[arm] for arm in ("arm0", "arm1")}
    alone = compare_to_first(pair, better="lower", comparisons=2)
    values["arm2"] = np.full((3, 12), bad)
    fine, lost = compare_to_first(values, better="lower", comparisons=2)
    assert fine == alone[0]
    assert lost.interval is None
    assert lost.verdict == "no difference"
    assert (fine.reason, lost.reason) == (None, "a value is missing or infinite")


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({"a": np.zeros((3, 0)), "b": np.zeros((3, 0))}, {}, "values: expected one shape"),
        ({"a": np.zeros(3), "b": np.zeros(3)}, {}, "values: expected one shape"),
        ({"a": np.zeros((3, 2))}, {"better": "smaller"}, "better: expected"),
        ({"a": np.zeros((3, 2))}, {"comparisons": 0}, "comparisons: expected at least 1, got 0"),
    ],
)
def test_bad_arguments(values, changes, message):
    with pytest.raises(ValueError, match=message):
        compare_to_first(values, **{"better": "lower", "comparisons": 1} | changes)


def test_seeds_that_agree_by_chance_do_not_make_the_interval_vanish():
    """Two seeds, each a point ahead in one item: equal means, different items."""
    first = np.zeros((2, 12))
    other = np.zeros((2, 12))
    other[0, 3] = other[1, 3] = 0.25
    (found,) = compare_to_first({"a": first, "b": other}, better="higher", comparisons=1)
    assert found.verdict == "no difference"
    assert found.interval[0] < 0 < found.interval[1]
