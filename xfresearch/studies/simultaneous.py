"""Intervals of all differences of a study that hold at once: arms A, rungs R of the ladder, pairs of runs N, draws B.

Few pairs say little about their own spread, so spreads are shared: the variance of an arm's differences at a rung comes from
a distribution that the rungs of the arm have in common (a scaled inverse chi-squared, Smyth 2004, "Linear models and
empirical Bayes methods", eq. 2 and 5). Its freedom is estimated: if the variances agree, all rungs count as one, and if they
do not, each has its own. At one rung, arms share in place of rungs.

The critical values are those of the largest |t| of all arms and rungs over draws of the errors: normal ones whose variances
are drawn, too, given the measured ones, with the freedom and the centre of their distribution. A fixed freedom is too large
by chance where few variances share, as of two arms at one rung. So the chance of any false interval in a study is 5 %,
whatever the number of arms and rungs. Dunnett's test, which takes one variance for all arms, is wrong twice as often as it
says if one arm varies more, and ignores the noise that pairs share (tests/studies/test_simultaneous.py).
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import special

ALPHA, POWER = 0.05, 0.8
DRAWS = 10_000
AGREE = 0.01  # variance of log variances beyond that of chance, from which on they differ: a freedom of 200
DIFFER = 100.0  # the largest such variance that is drawn: a freedom of 0.2
LEAST = 1e-12  # deviation, relative to the largest difference, of differences that are all equal


class Intervals(NamedTuple):
    """Arrays [A, C] over arms and contrasts, NaN where an arm has no difference. p is of the whole study."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    inner_low: np.ndarray  # one-sided bounds: that all arms are above, or all below, has a chance of 95 %
    inner_high: np.ndarray
    error: np.ndarray  # standard error
    p: np.ndarray  # of no difference
    critical: float  # of |t|, for low and high
    inner_critical: float  # of t, for the one-sided bounds
    draws: np.ndarray  # [B] the largest |t| of each draw, ascending
    inner_draws: np.ndarray

    def p_beyond(self, margin: float) -> np.ndarray:
        """p of two one-sided tests: that a difference is not within +-margin."""
        return self._p((np.abs(self.mean) - margin) / self.error)

    def p_worse(self, margin: float) -> np.ndarray:
        """p of a one-sided test: that an arm is worse by margin or more."""
        return self._p((self.mean - margin) / self.error)

    def _p(self, t_AC: np.ndarray) -> np.ndarray:
        return _above(self.inner_draws, -t_AC)


class _Logs(NamedTuple):
    """Unbiased log variances z_AR: the mean of each arm [A, 1] (of one rung: [1, 1]), of how many, and the squares of what
    is left, with their degrees of freedom."""

    centre: np.ndarray
    number: np.ndarray
    squares: np.ndarray
    left: int


def _logs(variances_AR: np.ndarray, freedom: float) -> _Logs:
    known = ~np.isnan(variances_AR)
    with np.errstate(invalid="ignore"):
        z_AR = np.log(variances_AR) - special.digamma(freedom / 2) + math.log(freedom / 2)
    axis = -1 if variances_AR.shape[-1] > 1 else -2
    number = known.sum(axis, keepdims=True)
    centre = np.where(known, z_AR, 0.0).sum(axis, keepdims=True) / np.maximum(number, 1)
    left = int((known.sum((-2, -1)) - (number > 0).sum((-2, -1))).max())
    return _Logs(centre, number, np.where(known, np.square(z_AR - centre), 0.0).sum((-2, -1)), left)


def _moved(variances: np.ndarray, freedom: float, centre: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Variances that are moved towards the scale of their distribution, whose logs have the mean `centre`; prior: its
    degrees of freedom (Smyth 2004, eq. 5)."""
    scale = np.exp(centre + special.digamma(prior / 2) - np.log(prior / 2))
    return (prior * scale + freedom * variances) / (prior + freedom)


def shared_variances(variances_AR: np.ndarray, freedom: float) -> np.ndarray:
    """Variances [..., A, R] of `freedom` degrees each, moved towards the variance that the rungs of an arm share. NaNs are
    left out."""
    logs = _logs(variances_AR, freedom)
    if logs.left < 1:
        return variances_AR
    excess = logs.squares / logs.left - special.polygamma(1, freedom / 2)
    prior = 2 * inverse_trigamma(np.maximum(excess, AGREE))[..., None, None]
    return _moved(variances_AR, freedom, logs.centre, prior)


def drawn_variances(variances_AR: np.ndarray, freedom: float, draws: int, rng: np.random.Generator) -> np.ndarray:
    """[draws, A, R]: true variances, given measured ones of `freedom` degrees each. The variance of the logs, which is that
    of chance or more, has a flat prior in its log, and so have the centres. NaN for NaN."""
    logs, shape = _logs(variances_AR, freedom), (draws, *variances_AR.shape)
    if logs.left < 1:
        return variances_AR * freedom / rng.chisquare(freedom, shape)
    of_chance, half = special.polygamma(1, freedom / 2), logs.left / 2
    least = of_chance + AGREE
    squares = max(float(logs.squares), 0.1 * logs.left * least)  # below, the quantiles are those of hardly any freedom
    below_B = rng.random(draws) * special.gammainc(half, squares / (2 * least))
    total_B11 = (squares / (2 * special.gammaincinv(half, below_B)))[:, None, None]
    prior_B11 = 2 * inverse_trigamma(np.minimum(total_B11 - of_chance, DIFFER))
    error = np.sqrt(np.minimum(total_B11, DIFFER) / np.maximum(logs.number, 1))
    centre = logs.centre + error * rng.standard_normal((draws, *logs.centre.shape))
    whole_BAR = np.broadcast_to(prior_B11 + freedom, shape)
    return _moved(variances_AR, freedom, centre, prior_B11) * whole_BAR / rng.chisquare(whole_BAR)


def inverse_trigamma(y: np.ndarray) -> np.ndarray:
    """x with trigamma(x) = y, by Newton's method on 1 / trigamma (Smyth 2004, appendix)."""
    y = np.asarray(y, np.float64)
    x = 0.5 + 1 / y
    for _ in range(12):
        trigamma = special.polygamma(1, x)
        x = x + trigamma * (1 - trigamma / y) / special.polygamma(2, x)
    return x


def intervals(
    differences_ARN: np.ndarray,
    contrasts_CR: np.ndarray | None = None,
    rises_BAR: np.ndarray | None = None,
    alpha: float = ALPHA,
    draws: int = DRAWS,
) -> Intervals:
    """Intervals of contrasts: sums over rungs of the mean differences with weights contrasts_CR (the identity: each rung).

    rises_BAR: by how much the rates of resampled choices raise an arm's metric more than the baseline's (rates.py). Their
    mean is taken off the difference, and their spread is added to its error. An arm that has NaN at some rung has NaN in
    each contrast that needs it.
    """
    A, R, n = differences_ARN.shape
    contrasts_CR = np.eye(R) if contrasts_CR is None else np.asarray(contrasts_CR, np.float64)
    rises_BAR = np.zeros((1, A, R)) if rises_BAR is None else rises_BAR
    rng, freedom = np.random.default_rng(0), n - 1
    least = np.square(LEAST * max(np.nanmax(np.abs(differences_ARN), initial=0.0), LEAST))
    variances_AR = np.maximum(differences_ARN.var(-1, ddof=1), least)
    rise_AC = _summed(rises_BAR.mean(0), contrasts_CR)
    mean_AC = _summed(differences_ARN.mean(-1), contrasts_CR) - rise_AC
    variance_AC = _squared(shared_variances(variances_AR, freedom), contrasts_CR) / n
    error_AC = np.sqrt(variance_AC + _summed(rises_BAR, contrasts_CR).var(0))

    noise_BAR = rng.standard_normal((draws, A, R)) * np.sqrt(drawn_variances(variances_AR, freedom, draws, rng) / n)
    rises_BAC = _summed(rises_BAR[rng.integers(len(rises_BAR), size=draws)], contrasts_CR) - rise_AC
    with np.errstate(invalid="ignore"):  # a contrast without weights is 0 / 0
        t_BAC = (_summed(noise_BAR, contrasts_CR) + rises_BAC) / error_AC
        t_AC = mean_AC / error_AC
    largest_B = np.sort(np.nanmax(np.abs(t_BAC), (1, 2), initial=0.0))
    inner_B = np.sort(np.nan_to_num(np.nanmax(t_BAC, (1, 2), initial=-math.inf), neginf=0.0))  # 0: no contrast
    critical, inner = (float(np.quantile(each_B, 1 - alpha)) for each_B in (largest_B, inner_B))
    half, inner_half = critical * error_AC, inner * error_AC
    p_AC = _above(largest_B, np.abs(t_AC))
    ends = (mean_AC - half, mean_AC + half, mean_AC - inner_half, mean_AC + inner_half)
    return Intervals(mean_AC, *ends, error_AC, p_AC, critical, inner, largest_B, inner_B)


@cache
def typical_critical(
    arms: int, rungs: int, pairs: int, alpha: float = ALPHA, draws: int = DRAWS // 4
) -> tuple[float, float]:
    """The mean of the two critical values of studies whose variances agree, for a plan."""
    rng, number = np.random.default_rng(0), math.ceil(2 * DRAWS / draws)
    samples = [intervals(rng.standard_normal((arms, rungs, pairs)), alpha=alpha, draws=draws) for _ in range(number)]
    return float(np.mean([each.critical for each in samples])), float(np.mean([each.inner_critical for each in samples]))


def detectable(error: float, critical: float) -> float:
    """The smallest difference with this standard error that is found with a chance of 80 %."""
    return (critical + special.ndtri(POWER)) * error


def chance_of_equivalent(margin: float, error: float, inner_critical: float) -> float:
    """The chance that an arm without a difference is called equivalent."""
    return max(0.0, float(2 * special.ndtr(margin / error - inner_critical) - 1)) if error else 1.0


def _above(sorted_B: np.ndarray, t_AC: np.ndarray) -> np.ndarray:
    """The share of draws with a larger t; at least one more than none. NaN for NaN."""
    share = (1 + len(sorted_B) - np.searchsorted(sorted_B, t_AC)) / (1 + len(sorted_B))
    return np.where(np.isnan(t_AC), np.nan, share)


def _summed(values_AR: np.ndarray, contrasts_CR: np.ndarray) -> np.ndarray:
    """[..., A, C]: sums over rungs. A rung with the weight 0 may be NaN."""
    unknown = (np.isnan(values_AR)[..., None, :] & (contrasts_CR != 0)).any(-1)
    return np.where(unknown, np.nan, np.nan_to_num(values_AR) @ contrasts_CR.T)


def _squared(variances_AR: np.ndarray, contrasts_CR: np.ndarray) -> np.ndarray:
    return _summed(variances_AR, np.square(contrasts_CR))
