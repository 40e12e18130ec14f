"""The statistics of studies against SciPy, closed forms, and simulated studies whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from xfresearch.runtime.errors import UserError
from xfresearch.studies import estimates, rates
from xfresearch.studies.verdicts import paired


def runs(rng, n: int, effect: float = 0.0, shared: float = 0.9, deviation: float = 1.0):
    """An arm and a baseline whose runs have the share `shared` of their variance in common."""
    common = math.sqrt(shared) * rng.standard_normal(n)
    own = math.sqrt(1 - shared) * rng.standard_normal((2, n))
    return effect + deviation * (common + own[0]), deviation * (common + own[1])


def test_the_paired_difference_is_that_of_scipy():
    arm, baseline = runs(np.random.default_rng(0), 7, effect=-0.2)
    result = paired(arm, baseline)
    expected = stats.ttest_rel(arm, baseline)
    interval = expected.confidence_interval(0.95)
    assert (result.mean, result.p) == pytest.approx(((arm - baseline).mean(), expected.pvalue))
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high))
    assert result.correlation == pytest.approx(np.corrcoef(arm, baseline)[0, 1])
    assert result.low < result.bootstrap_low < result.mean < result.bootstrap_high < result.high  # few pairs: too narrow


def test_differences_that_are_equal_up_to_rounding_do_not_vary():
    baseline = 1 - np.array([1204, 1377, 1530, 1719]) / 3000
    result = paired(baseline + 7 / 3000, baseline)
    assert result.deviation == 0 and (result.low, result.bootstrap_low) == (result.mean, result.mean)


def test_the_interval_contains_the_truth_at_the_stated_rate():
    rng = np.random.default_rng(1)
    differences = [paired(*runs(rng, 5, effect=0.3)) for _ in range(200)]
    assert np.mean([each.low <= 0.3 <= each.high for each in differences]) == pytest.approx(0.95, abs=0.04)


def test_pairing_is_worth_what_its_correlation_says():
    arm, baseline = runs(np.random.default_rng(2), 4000, shared=0.75)
    result = paired(arm, baseline)
    assert result.correlation == pytest.approx(0.75, abs=0.03)
    assert result.unpaired_deviation == pytest.approx(math.sqrt(2), rel=0.05)


def test_runs_without_a_result_are_refused():
    with pytest.raises(UserError, match="a run has no finite result"):
        paired([1.0, math.nan], [1.0, 2.0])
    with pytest.raises(UserError, match="3 runs of an arm and 2 of the baseline"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(UserError, match="at least 2"):
        paired([1.0], [2.0])


def test_runs_that_are_equal_differ_by_nothing():
    same = paired([1.0, 2.0], [1.0, 2.0])
    assert (same.mean, same.p, same.low, same.high) == (0.0, 1.0, 0.0, 0.0)


def test_the_interval_of_the_noise_contains_the_truth_at_the_stated_rate():
    rng = np.random.default_rng(6)
    listed = [estimates.noise(rng.normal(3.0, 0.2, 5)) for _ in range(2000)]
    assert np.mean([low <= 0.2 <= high for _, low, high in listed]) == pytest.approx(0.95, abs=0.015)
    assert listed[0][1] < listed[0][0] < listed[0][2]


def test_the_best_rate_may_lie_at_the_edge():
    assert rates.best_rate({1e-3: 2.0, 3e-3: 1.5, 1e-2: math.nan}) == 3e-3
    assert rates.at_edge({1e-3: 2.0, 3e-3: 1.5, 1e-2: math.nan}) == ""  # a rate that diverges bounds the grid
    assert rates.at_edge({1e-3: 2.0, 3e-3: 1.5}) == "high"
    assert rates.at_edge({1e-3: 1.0, 3e-3: 1.5}) == "low"
    assert rates.best_rate({1e-2: math.inf, 1e-3: math.nan}) is None
    assert rates.best_rate({1e-3: 0.0, 3e-3: 0.0, 1e-2: 0.0}) == 3e-3  # all solve the task
    assert rates.best_rate({1e-3: 0.5, 3e-3: 0.0, 1e-2: 0.0}) == 3e-3
    assert rates.at_edge({1e-2: math.inf, 1e-3: math.nan}) == "low"  # a smaller one may not diverge


def test_sensitivity_is_the_mean_rise_over_the_best_rate():
    assert estimates.sensitivity({1e-3: 2.0, 3e-3: 1.5, 1e-2: math.nan}, 6.0) == pytest.approx((0.5 + 0.0 + 4.5) / 3)
    assert estimates.sensitivity({1e-3: 9.0, 3e-3: 1.5}, 6.0) == pytest.approx(4.5 / 2)
    assert math.isnan(estimates.sensitivity({1e-3: math.nan, 3e-3: math.inf}, 6.0))


def test_the_compute_saved_at_equal_loss_is_that_of_a_power_law():
    cost = np.geomspace(1.0, 100.0, 30)
    baseline = np.stack([cost, -np.log(cost)], 1)
    arm = np.stack([cost, -np.log(2 * cost)], 1)  # needs half the cost
    saved, lost = estimates.saved_at_equal_loss(arm, baseline)
    assert saved == pytest.approx(0.5) and math.isnan(lost)
    assert estimates.saved_at_equal_loss(baseline, arm)[1] == pytest.approx(0.5)
    assert estimates.saved_at_equal_loss(baseline, baseline) == pytest.approx((0.0, 0.0))
    at_once = np.array([[1.0, -99.0]])
    assert estimates.saved_at_equal_loss(at_once, baseline)[0] == pytest.approx(0.99)


def test_compute_after_the_last_loss_is_reached_is_not_saved():
    """The baseline has its last loss at a cost of 10, and the arm at 20: the arm saves nothing, and the baseline a half."""
    baseline = np.array([[5.0, 1.0], [10.0, 0.0], [40.0, 0.0]])
    arm = np.array([[5.0, 1.0], [20.0, 0.0], [40.0, 0.0]])
    assert estimates.saved_at_equal_loss(arm, baseline) == pytest.approx((-1.0, 0.5))
