"""What the runs of a study show: differences of paired runs, their intervals, and what they decide.

Two runs are a pair if they share a seed: the order of the data and the streams of random numbers. A difference is arm minus
baseline, of a metric where less is better. Tests are two-sided t tests of the pairs unless said otherwise. Where SciPy has
the method, it is SciPy's.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import integrate, optimize, special, stats

from xfresearch.comparing.pairing import holm
from xfresearch.runtime.errors import UserError

CONFIDENCE = 0.95
ALPHA, POWER = 0.05, 0.8
RESAMPLES = 2000
ROUNDING = 1e-12  # relative to the values of runs: differences that vary less are equal
SMALL = 5  # pairs; with so many or fewer, a report says that they are few

Verdict = Literal["better", "worse", "equivalent", "undecided"]


class Difference(NamedTuple):
    """Of n pairs. The interval of the t test, the bootstrap interval (BCa; too narrow for few pairs), p of no difference."""

    n: int
    mean: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    p: float
    deviation: float  # standard deviation of the differences
    correlation: float  # of the pairs: what pairing is worth
    unpaired_deviation: float  # of the differences if the pairs were not correlated


def paired(arm: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The difference between the runs of an arm and those of the baseline, in the same order of seeds. Raises UserError
    for fewer than two pairs, pairs that are not complete, and values that are not finite: a comparison does not shrink."""
    a_N, b_N = np.asarray(arm, np.float64), np.asarray(baseline, np.float64)
    if a_N.shape != b_N.shape or len(a_N) < 2:
        raise UserError(f"{len(a_N)} runs of an arm and {len(b_N)} of the baseline: there must be as many, and at least 2")
    if not np.isfinite([a_N, b_N]).all():
        raise UserError("a run has no finite result: run it again, or leave its arm out of the study")
    d_N = a_N - b_N
    mean, deviation = float(d_N.mean()), float(d_N.std(ddof=1))
    unpaired = math.hypot(a_N.std(ddof=1), b_N.std(ddof=1))
    if deviation <= ROUNDING * np.abs([a_N, b_N]).max():  # the same runs, or a metric that does not vary
        p, correlation = (1.0 if not mean else 0.0), 1.0
        return Difference(len(d_N), mean, mean, mean, mean, mean, p, 0.0, correlation, unpaired)
    test = stats.ttest_rel(a_N, b_N)
    low, high = test.confidence_interval(CONFIDENCE)
    ends = _bootstrap(d_N)
    correlation = float(np.corrcoef(a_N, b_N)[0, 1]) if a_N.std() and b_N.std() else 0.0
    return Difference(len(d_N), mean, float(low), float(high), *ends, float(test.pvalue), deviation, correlation, unpaired)


def _bootstrap(d_N: np.ndarray) -> tuple[float, float]:
    """The ends of the bias-corrected and accelerated bootstrap interval of the mean."""
    rng = np.random.default_rng(0)
    found = stats.bootstrap((d_N,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="BCa", rng=rng)
    return tuple(map(float, found.confidence_interval))


class Independent(NamedTuple):
    """A sum over sizes of a seed's differences, if those of different sizes are independent: its deviation over the seeds,
    and the ends of the interval of its mean."""

    deviation: float
    low: float
    high: float


def if_independent(weights_S: np.ndarray, differences_SN: np.ndarray) -> Independent:
    """Of the sum of weights_S * differences_SN over sizes S for each of N seeds, with the degrees of freedom of Welch (1947)
    and Satterthwaite (1946). If the deviation of the seeds' own sums is far below this one, the differences of the sizes
    cancel in the sum, which may be chance."""
    n = differences_SN.shape[1]
    mean, variances_S = weights_S @ differences_SN.mean(1), np.square(weights_S) * differences_SN.var(1, ddof=1)
    if not variances_S.any():
        return Independent(0.0, float(mean), float(mean))
    freedom = (n - 1) * variances_S.sum() ** 2 / np.square(variances_S).sum()
    deviation = math.sqrt(variances_S.sum())
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, freedom) * deviation / math.sqrt(n)
    return Independent(deviation, float(mean - half), float(mean + half))


def corrected(p_values: Mapping[str, float], arms: int) -> dict[str, float]:
    """p of the arms, corrected by Holm's method (comparing/pairing.py) for as many arms as the study has: one that has
    failed counts with p = 1."""
    failed = [1.0] * (arms - len(p_values))
    return dict(zip(p_values, holm([*p_values.values(), *failed])[: len(p_values)], strict=True))


def equivalence(difference: Difference, margin: float) -> float:
    """p of two one-sided t tests (Schuirmann 1987): that the difference is not within +-margin."""
    if not difference.deviation:
        return 0.0 if abs(difference.mean) < margin else 1.0
    return max(_one_sided(difference, margin), _one_sided(difference._replace(mean=-difference.mean), margin))


def no_worse(difference: Difference, margin: float) -> float:
    """p of one one-sided t test: that the arm is worse than the baseline by margin or more."""
    if not difference.deviation:
        return 0.0 if difference.mean < margin else 1.0
    return _one_sided(difference, margin)


def _one_sided(difference: Difference, margin: float) -> float:
    """p of mean >= margin."""
    error = difference.deviation / math.sqrt(difference.n)
    return float(stats.t.cdf((difference.mean - margin) / error, difference.n - 1))


class Decision(NamedTuple):
    """What the tests say of an arm. Each p is corrected by Holm's method over the arms."""

    verdict: Verdict
    p_holm: float  # of no difference
    p_equivalent: float  # of a difference that is not within +-margin
    p_no_worse: float  # of an arm that is worse by margin or more


def decisions(differences: Mapping[str, Difference], margin: float, arms: int) -> dict[str, Decision]:
    """Of each arm that has a difference, in a study of `arms` arms beside the baseline. The verdict is 'equivalent' (within
    +-margin) by the tests of equivalence, also if a difference is found: the margin is the largest difference that counts as
    none. Otherwise it is 'better' or 'worse' by the t tests."""
    found = corrected({name: each.p for name, each in differences.items()}, arms)
    within = corrected({name: equivalence(each, margin) for name, each in differences.items()}, arms)
    below = corrected({name: no_worse(each, margin) for name, each in differences.items()}, arms)
    return {
        name: Decision(_verdict(each.mean, found[name], within[name]), found[name], within[name], below[name])
        for name, each in differences.items()
    }


def _verdict(mean: float, p_found: float, p_within: float) -> Verdict:
    if p_within < ALPHA:
        return "equivalent"
    if p_found < ALPHA:
        return "better" if mean < 0 else "worse"
    return "undecided"


def power(difference: float, deviation: float, n: int, alpha: float = ALPHA, pairs: bool = True) -> float:
    """The chance that a t test finds a difference. deviation: of the differences of pairs; with pairs=False of the runs of
    each arm, of n runs each."""
    freedom, error = (n - 1, deviation / math.sqrt(n)) if pairs else (2 * n - 2, deviation * math.sqrt(2 / n))
    if not error:
        return 1.0 if difference else alpha
    critical, shift = stats.t.ppf(1 - alpha / 2, freedom), abs(difference) / error

    def found(ratio: float) -> float:
        return special.ndtr(shift - critical * ratio) + special.ndtr(-shift - critical * ratio)

    return _over_estimates(found, freedom)  # SciPy's noncentral t distribution is NaN for large shifts


def _over_estimates(chance: Callable[[float], float], freedom: int) -> float:
    """The mean of chance(ratio) over the ratio of an estimated to the true deviation, which is chi / sqrt(freedom)."""
    scale = (freedom / 2 - 1) * math.log(2) + math.lgamma(freedom / 2)

    def density(x: float) -> float:  # of chi; stats.chi.pdf takes a hundred times as long for one number
        return math.exp((freedom - 1) * math.log(x) - x * x / 2 - scale) * chance(x / math.sqrt(freedom))

    return float(integrate.quad(density, *stats.chi.ppf((1e-9, 1 - 1e-9), freedom), limit=200)[0])


def equivalence_power(margin: float, deviation: float, n: int, alpha: float = ALPHA) -> float:
    """The chance that the tests of equivalence succeed with n pairs if there is no difference."""
    if not deviation:
        return 1.0
    largest, critical = margin * math.sqrt(n) / deviation, stats.t.ppf(1 - alpha, n - 1)

    def small_enough(ratio: float) -> float:  # the mean, beside what its estimated error leaves of the margin
        return max(0.0, 2 * special.ndtr(largest - critical * ratio) - 1)

    return _over_estimates(small_enough, n - 1)


def detectable(deviation: float, n: int, alpha: float = ALPHA, pairs: bool = True) -> float:
    """The smallest difference that n pairs find with a chance of 80 %; deviation as in `power`."""
    if n < 2:
        return math.inf
    if not deviation:
        return 0.0
    high = 1.0
    while power(high, 1.0, n, alpha, pairs) < POWER:
        high *= 2
    return deviation * float(optimize.brentq(lambda difference: power(difference, 1.0, n, alpha, pairs) - POWER, 1e-6, high))


def seeds_for(difference: float, deviation: float, alpha: float = ALPHA, pairs: bool = True) -> int:
    """The smallest number of pairs that finds a difference with a chance of 80 %. Raises UserError above a million."""
    enough = lambda n: power(difference, deviation, n, alpha, pairs) >= POWER  # noqa: E731
    high = 2
    while not enough(high):
        high *= 2
        if high > 1 << 20:
            raise UserError(f"a difference of {difference:g} is too small to be found beside a deviation of {deviation:g}")
    return bisect.bisect_left(range(high + 1), True, lo=max(2, high // 2), key=enough)


def noise(values: Sequence[float]) -> tuple[float, float, float]:
    """The standard deviation of runs that differ in their seed alone, and the ends of its interval (chi-squared)."""
    deviation, freedom = float(np.std(values, ddof=1)), len(values) - 1
    low, high = stats.chi2.ppf((0.5 + CONFIDENCE / 2, 0.5 - CONFIDENCE / 2), freedom)
    return deviation, deviation * math.sqrt(freedom / low), deviation * math.sqrt(freedom / high)


class Trend(NamedTuple):
    """The change of a difference from the smallest size to the largest one, its interval, its p and its deviation."""

    change: float
    low: float
    high: float
    p: float
    deviation: float
    independent: Independent


def trend(differences: Mapping[float, Sequence[float]]) -> Trend:
    """Of the differences of pairs by size, such as the number of parameters, in the same order of seeds: each seed has a
    straight line over the logarithm of the size, by least squares, and a t test is of their slopes. So the differences of a
    seed at several sizes may be correlated, and vary more at one of them. Raises UserError for fewer than two sizes."""
    if len(differences) < 2:
        raise UserError("a trend is not defined for fewer than two sizes")
    x_S = np.log(list(differences)) / math.log(max(differences) / min(differences))
    slopes_S = (x_S - x_S.mean()) / np.square(x_S - x_S.mean()).sum()
    differences_SN = np.array(list(differences.values()), np.float64)
    found = paired(slopes_S @ differences_SN, np.zeros(differences_SN.shape[1]))
    independent = if_independent(slopes_S, differences_SN)
    return Trend(found.mean, found.low, found.high, found.p, found.deviation, independent)


def sensitivity(losses: Mapping[float, float], highest: float) -> float:
    """The mean rise of the loss over its minimum, over the learning rates (Wortsman et al. 2023, section 2.2). A loss counts
    as at most `highest`, that of a model which has learnt nothing. NaN if every run diverged."""
    if not any(map(math.isfinite, losses.values())):
        return math.nan
    capped = [min(loss, highest) if math.isfinite(loss) else highest for loss in losses.values()]
    return float(np.mean(capped) - min(capped))


def saved_at_equal_loss(arm: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
    """Two curves [points, 2] of (cost, loss): the share of the cost that the arm saves to reach the baseline's last loss,
    relative to what the baseline needs for it, and the share that the baseline saves to reach the arm's. Between points,
    the loss is linear in the logarithm of the cost. NaN where a curve never reaches the other's last loss."""
    return _saved(arm, baseline), _saved(baseline, arm)


def _saved(curve: np.ndarray, other: np.ndarray) -> float:
    target = float(np.asarray(other, np.float64)[-1, 1])
    return float(1 - _cost_of(target, curve) / _cost_of(target, other))


def _cost_of(target: float, curve: np.ndarray) -> float:
    """The cost at which a curve first has the loss `target` or less; NaN if it never has."""
    cost_P, loss_P = np.asarray(curve, np.float64).T
    below = np.flatnonzero(loss_P <= target)
    if not len(below):
        return math.nan
    first = int(below[0])
    if not first:
        return float(cost_P[0])
    share = (loss_P[first - 1] - target) / (loss_P[first - 1] - loss_P[first])
    return math.exp((1 - share) * math.log(cost_P[first - 1]) + share * math.log(cost_P[first]))
