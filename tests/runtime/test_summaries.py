"""Means and their intervals."""

import math

import numpy as np
import pytest
from scipy import stats

from xfresearch.runtime.summaries import mean_interval, mean_of_known, ratio_interval


def test_the_interval_is_that_of_scipy():
    values = np.random.default_rng(0).standard_normal(7)
    low, high = stats.t.interval(0.95, 6, loc=values.mean(), scale=stats.sem(values))
    mean, half = mean_interval([*values, math.nan])
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_it_contains_the_truth_at_the_stated_rate():
    rng = np.random.default_rng(1)
    listed = [mean_interval(rng.standard_normal(5)) for _ in range(2000)]
    assert np.mean([abs(mean) <= half for mean, half in listed]) == pytest.approx(0.95, abs=0.015)


def test_the_interval_of_a_ratio_contains_the_truth_at_the_stated_rate():
    rng = np.random.default_rng(2)
    below = 4 + rng.standard_normal((2000, 30))
    above = 0.5 * below + 0.2 * rng.standard_normal(below.shape)
    listed = [ratio_interval(*pair) for pair in zip(above, below, strict=True)]
    assert listed[0][0] == pytest.approx(above[0].sum() / below[0].sum())
    assert np.mean([abs(ratio - 0.5) <= half for ratio, half in listed]) == pytest.approx(0.95, abs=0.015)
    assert all(map(math.isnan, ratio_interval([1.0, 2.0], [0.0, 0.0])))


def test_one_value_has_no_interval():
    assert mean_interval([3.0])[0] == 3.0 and math.isnan(mean_interval([3.0])[1])
    assert all(map(math.isnan, mean_interval([])))


def test_the_mean_of_known_values_leaves_out_nan():
    values = np.array([[1.0, np.nan], [3.0, np.nan]])
    np.testing.assert_array_equal(mean_of_known(values, 0), [2.0, np.nan])
    assert mean_of_known(values) == 2.0 and math.isnan(mean_of_known([]))
