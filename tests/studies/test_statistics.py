"""The statistics of studies against SciPy, closed forms, and simulated studies whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from xfresearch.runtime.errors import UserError
from xfresearch.studies import rates, statistics
from xfresearch.studies.statistics import Difference, paired


def runs(rng, n: int, effect: float = 0.0, shared: float = 0.9, deviation: float = 1.0):
    """An arm and a baseline whose runs have the share `shared` of their variance in common."""
    common = math.sqrt(shared) * rng.standard_normal(n)
    own = math.sqrt(1 - shared) * rng.standard_normal((2, n))
    return effect + deviation * (common + own[0]), deviation * (common + own[1])


def test_the_paired_difference_is_that_of_scipy():
    arm, baseline = runs(np.random.default_rng(0), 7, effect=-0.2)
    found = paired(arm, baseline)
    expected = stats.ttest_rel(arm, baseline)
    interval = expected.confidence_interval(0.95)
    assert (found.mean, found.p) == pytest.approx(((arm - baseline).mean(), expected.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.correlation == pytest.approx(np.corrcoef(arm, baseline)[0, 1])
    assert found.low < found.bootstrap_low < found.mean < found.bootstrap_high < found.high  # few pairs: too narrow


def test_differences_that_are_equal_up_to_rounding_do_not_vary():
    baseline = 1 - np.array([1204, 1377, 1530, 1719]) / 3000
    found = paired(baseline + 7 / 3000, baseline)
    assert found.deviation == 0 and (found.low, found.bootstrap_low) == (found.mean, found.mean)


def test_the_mean_of_independent_sizes_is_that_of_welch():
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.3, 1.0, 5), rng.normal(0.5, 3.0, 5)
    deviation, *ends = statistics.if_independent(np.array([0.5, 0.5]), np.stack([first, second]))
    expected = stats.ttest_ind(first, -second, equal_var=False).confidence_interval(0.95)  # of the sum
    assert ends == pytest.approx([expected.low / 2, expected.high / 2])
    assert deviation == pytest.approx(np.hypot(first.std(ddof=1), second.std(ddof=1)) / 2)
    trend = statistics.trend({2.0: first, 8.0: second})
    assert trend.deviation == pytest.approx((second - first).std(ddof=1))
    expected = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    assert trend.independent[1:] == pytest.approx([expected.low, expected.high])
    assert statistics.if_independent(np.array([0.5, 0.5]), np.ones((2, 5))) == (0.0, 1.0, 1.0)


def test_the_interval_contains_the_truth_at_the_stated_rate():
    rng = np.random.default_rng(1)
    differences = [paired(*runs(rng, 5, effect=0.3)) for _ in range(1000)]
    assert np.mean([each.low <= 0.3 <= each.high for each in differences]) == pytest.approx(0.95, abs=0.02)


def test_pairing_is_worth_what_its_correlation_says():
    arm, baseline = runs(np.random.default_rng(2), 4000, shared=0.75)
    found = paired(arm, baseline)
    assert found.correlation == pytest.approx(0.75, abs=0.03)
    assert found.unpaired_deviation == pytest.approx(math.sqrt(2), rel=0.05)


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
    assert statistics.decisions({"a": same}, 0.1, 1)["a"].verdict == "equivalent"
    assert statistics.no_worse(same, 0.1) == 0.0 and statistics.no_worse(same, 0.0) == 1.0


def test_equivalence_is_two_tests_of_scipy():
    arm, baseline = runs(np.random.default_rng(3), 6)
    found = paired(arm, baseline)
    differences = arm - baseline
    above = stats.ttest_1samp(differences, -0.8, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.8, alternative="less").pvalue
    assert statistics.equivalence(found, 0.8) == pytest.approx(max(above, below))
    assert statistics.no_worse(found, 0.8) == pytest.approx(below)


def simulated(studies: int, effects, n: int, margin: float, deviation: float = 1.0) -> list[dict]:
    """The verdicts of studies whose arms have these effects, and one baseline."""
    rng, found = np.random.default_rng(4), []
    for _ in range(studies):
        baseline = rng.standard_normal(n) * deviation
        arms = {str(k): effect + baseline + 0.5 * deviation * rng.standard_normal(n) for k, effect in enumerate(effects)}
        differences = {name: _without_bootstrap(arm, baseline) for name, arm in arms.items()}
        found.append({name: each.verdict for name, each in statistics.decisions(differences, margin, len(arms)).items()})
    return found


def _without_bootstrap(arm, baseline) -> Difference:
    """The bootstrap takes nearly all of the time, and verdicts do not use it."""
    test, d_N = stats.ttest_rel(arm, baseline), arm - baseline
    nan = math.nan
    return Difference(len(d_N), d_N.mean(), nan, nan, nan, nan, test.pvalue, d_N.std(ddof=1), nan, nan)


def test_arms_at_the_margin_are_called_equivalent_at_most_at_the_stated_rate():
    found = simulated(1000, [2.0] * 4, n=5, margin=2.0)
    wrong = np.mean([any(verdict == "equivalent" for verdict in each.values()) for each in found])
    assert wrong <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)


def test_a_difference_within_the_margin_is_equivalent_even_if_it_is_found():
    found = simulated(200, [0.3], n=8, margin=1.5, deviation=0.1)
    assert all(each["0"] == "equivalent" for each in found)


def test_the_chance_of_equivalent_is_the_rate_of_simulated_studies():
    differences = np.random.default_rng(9).normal(0.0, 0.01, (20000, 5))
    mean, error = differences.mean(1), differences.std(1, ddof=1) / math.sqrt(5)
    for margin, alpha in ((0.02, 0.05), (0.03, 0.05 / 4)):
        rate = np.mean(np.abs(mean) < margin - stats.t.ppf(1 - alpha, 4) * error)
        assert statistics.equivalence_power(margin, 0.01, 5, alpha) == pytest.approx(rate, abs=0.01)
    assert statistics.equivalence_power(0.01, 0.0, 5) == 1.0


def test_a_planted_effect_is_found_and_a_null_is_not():
    found = simulated(200, [-2.0, 2.0, 0.0], n=8, margin=1.5)
    for arm, expected in (("0", "better"), ("1", "worse"), ("2", "equivalent")):
        assert np.mean([each[arm] == expected for each in found]) > 0.9


def test_power_is_the_rate_of_simulated_studies():
    rng = np.random.default_rng(5)
    for pairs in (True, False):
        a, b = rng.standard_normal((2, 6, 4000))
        test = stats.ttest_1samp(1.0 + a, 0.0) if pairs else stats.ttest_ind(1.0 + a, b)
        freedom, shift = (5, math.sqrt(6)) if pairs else (10, math.sqrt(3))
        exact = 1 - np.diff(stats.nct.cdf(stats.t.ppf((0.025, 0.975), freedom), freedom, shift))
        assert statistics.power(1.0, 1.0, 6, pairs=pairs) == pytest.approx(float(exact[0]), rel=1e-6)
        assert exact[0] == pytest.approx((test.pvalue < 0.05).mean(), abs=0.025)


def test_a_detectable_difference_has_the_power():
    for pairs in (True, False):
        smallest = statistics.detectable(0.3, 5, pairs=pairs)
        assert statistics.power(smallest, 0.3, 5, pairs=pairs) == pytest.approx(0.8)
    assert statistics.detectable(0.3, 1) == math.inf and statistics.detectable(0.0, 5) == 0.0
    assert statistics.power(0.0, 1.0, 5) == pytest.approx(0.05)


def test_seeds_are_those_of_the_field():
    # Runs of 124 M models have a deviation of 0.0011 nats: about 19 seeds an arm for 0.001, 5 for 0.002 (unpaired, normal
    # approximation 2 (1.96 + 0.84)^2 (sigma / d)^2; Student's t adds one).
    assert statistics.seeds_for(0.001, 0.0011, pairs=False) in (20, 21)
    assert statistics.seeds_for(0.002, 0.0011, pairs=False) in (6, 7)
    n = statistics.seeds_for(0.01, 0.02)
    assert statistics.detectable(0.02, n) <= 0.01 < statistics.detectable(0.02, n - 1)
    with pytest.raises(UserError, match="too small to be found"):
        statistics.seeds_for(1e-9, 1.0)


def test_the_interval_of_the_noise_contains_the_truth_at_the_stated_rate():
    rng = np.random.default_rng(6)
    found = [statistics.noise(rng.normal(3.0, 0.2, 5)) for _ in range(2000)]
    assert np.mean([low <= 0.2 <= high for _, low, high in found]) == pytest.approx(0.95, abs=0.015)
    assert found[0][1] < found[0][0] < found[0][2]


def test_a_planted_trend_is_found_and_a_null_is_not():
    rng, found, null = np.random.default_rng(7), [], []
    for _ in range(400):
        noise = rng.normal(0.0, 0.01, (2, 5))
        found.append(statistics.trend({1e6: 0.05 + noise[0], 1e7: 0.10 + noise[1]}))
        null.append(statistics.trend({1e6: 0.05 + noise[0], 1e7: 0.05 + noise[1]}))
    assert np.mean([each.change for each in found]) == pytest.approx(0.05, abs=2e-3)
    assert np.mean([each.low <= 0.05 <= each.high for each in found]) == pytest.approx(0.95, abs=0.03)
    assert np.mean([each.p < 0.05 for each in null]) == pytest.approx(0.05, abs=0.03)
    with pytest.raises(UserError, match="fewer than two sizes"):
        statistics.trend({1e6: [0.1, 0.2]})
    assert statistics.trend({1e6: [0.1, 0.1], 1e7: [0.2, 0.2]})[:5] == pytest.approx((0.1, 0.1, 0.1, 0.0, 0.0))


@pytest.mark.parametrize("correlation, deviations", [(-0.5, (1, 1)), (0.8, (1, 1)), (0.0, (1, 1, 3))])
def test_a_trend_has_its_rate_if_sizes_are_correlated_or_differ_in_noise(correlation, deviations):
    rng, sizes = np.random.default_rng(8), len(deviations)
    covariance = np.full((sizes, sizes), correlation) + (1 - correlation) * np.eye(sizes)
    null = rng.multivariate_normal(np.zeros(sizes), covariance, (1000, 5)) * deviations
    found = [statistics.trend({2.0**size: null_N5[:, size] for size in range(sizes)}) for null_N5 in null]
    assert np.mean([each.p < 0.05 for each in found]) == pytest.approx(0.05, abs=0.02)


def test_an_arm_that_failed_counts_in_the_correction():
    difference = Difference(5, 0.1, 0.0, 0.2, 0.0, 0.2, 0.02, 0.05, 0.5, 0.07)
    alone, beside = (statistics.decisions({"a": difference}, 0.01, arms)["a"] for arms in (1, 3))
    assert (alone.p_holm, alone.verdict) == (0.02, "worse")
    assert (beside.p_holm, beside.verdict) == (pytest.approx(0.06), "undecided")


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
    assert statistics.sensitivity({1e-3: 2.0, 3e-3: 1.5, 1e-2: math.nan}, 6.0) == pytest.approx((0.5 + 0.0 + 4.5) / 3)
    assert statistics.sensitivity({1e-3: 9.0, 3e-3: 1.5}, 6.0) == pytest.approx(4.5 / 2)
    assert math.isnan(statistics.sensitivity({1e-3: math.nan, 3e-3: math.inf}, 6.0))


def test_the_compute_saved_at_equal_loss_is_that_of_a_power_law():
    cost = np.geomspace(1.0, 100.0, 30)
    baseline = np.stack([cost, -np.log(cost)], 1)
    arm = np.stack([cost, -np.log(2 * cost)], 1)  # needs half the cost
    saved, lost = statistics.saved_at_equal_loss(arm, baseline)
    assert saved == pytest.approx(0.5) and math.isnan(lost)
    assert statistics.saved_at_equal_loss(baseline, arm)[1] == pytest.approx(0.5)
    assert statistics.saved_at_equal_loss(baseline, baseline) == pytest.approx((0.0, 0.0))
    at_once = np.array([[1.0, -99.0]])
    assert statistics.saved_at_equal_loss(at_once, baseline)[0] == pytest.approx(0.99)


def test_compute_after_the_last_loss_is_reached_is_not_saved():
    """The baseline has its last loss at a cost of 10, and the arm at 20: the arm saves nothing, and the baseline a half."""
    baseline = np.array([[5.0, 1.0], [10.0, 0.0], [40.0, 0.0]])
    arm = np.array([[5.0, 1.0], [20.0, 0.0], [40.0, 0.0]])
    assert statistics.saved_at_equal_loss(arm, baseline) == pytest.approx((-1.0, 0.5))
