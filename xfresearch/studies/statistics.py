"""Statistics of single arms: differences of paired runs, noise, and the cost saved at equal loss. Verdicts are made from all
arms and rungs at once (simultaneous.py, decisions.py).

Two runs are a pair if they share a seed: the order of the data and the streams of random numbers. A difference is arm minus
baseline, of a metric where less is better. Tests are two-sided t tests of the pairs unless said otherwise. Where SciPy has
the method, it is SciPy's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from xfresearch.runtime.errors import UserError

CONFIDENCE = 0.95
RESAMPLES = 2000
ROUNDING = 1e-12  # relative to the values of runs: differences that vary less are equal
SMALL = 5  # pairs; with so many or fewer, a report says that they are few

class Difference(NamedTuple):
    """The mean difference of n pairs, with the interval of the t test, the bootstrap interval (BCa; too narrow for few
    pairs), and p of no difference."""

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
    resampled = stats.bootstrap((d_N,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="BCa", rng=rng)
    low, high = resampled.confidence_interval
    return float(low), float(high)


def noise(values: Sequence[float]) -> tuple[float, float, float]:
    """The standard deviation of runs that differ in their seed alone, and the ends of its interval (chi-squared)."""
    deviation, freedom = float(np.std(values, ddof=1)), len(values) - 1
    low, high = stats.chi2.ppf((0.5 + CONFIDENCE / 2, 0.5 - CONFIDENCE / 2), freedom)
    return deviation, deviation * math.sqrt(freedom / low), deviation * math.sqrt(freedom / high)


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
