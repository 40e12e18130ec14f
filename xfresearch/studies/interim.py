"""Looks at a study before all its runs, by a rule that is written before the first one (group-sequential tests).

With config.looks, every arm first has the pairs of the first look. An arm that has a verdict at every rung, or a run that
diverged, is settled: it gets no more runs, and keeps the figures of that look. The others have the pairs of the next look.

Each look is another chance of a false verdict. So the 5 % of a study are divided among the looks, by the spending function
of Lan and DeMets (1983) in O'Brien and Fleming's form: early looks have little. The levels sum to 5 %, so whatever looks
have in common, the chance of a false verdict or interval in a study is 5 % at most (Bonferroni's inequality). The critical
values of a look are those of all arms, also of the settled ones: arms that go on were not chosen at random.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import special

from xfresearch.runtime.errors import require
from xfresearch.studies import rates
from xfresearch.studies.cells import Cell, Ladder, Results, Trial, arms, tried
from xfresearch.studies.design import Study, rungs
from xfresearch.studies.simultaneous import ALPHA, DRAWS, Intervals, intervals, shared_variances, typical_critical

BEYOND = 20  # drawn studies beyond a critical value, on average
MOST_DRAWS = 50_000
SIMULATED = 500  # studies, for the plan


class Look(NamedTuple):
    """A look after so many pairs of runs, at this level, with critical values from so many drawn studies."""

    pairs: int
    level: float
    draws: int


class Evidence(NamedTuple):
    """Differences of arms A from the baseline at rungs R for pairs N, NaN where one failed, and what resampled choices B of
    rates cost the arms more than the baseline."""

    differences_ARN: np.ndarray
    rises_BAR: np.ndarray

    def intervals(self, look: Look, contrasts_CR: np.ndarray | None = None) -> Intervals:
        return intervals(self.differences_ARN, contrasts_CR, self.rises_BAR, look.level, look.draws)


def levels(pairs: Sequence[int], alpha: float = ALPHA) -> list[float]:
    """The level of each look, given its pairs of runs. On each side, 2 - 2 Phi(z_{alpha/4} / sqrt(t)) is spent up to the
    share t of all pairs."""
    spent = [4 * special.ndtr(-special.ndtri(1 - alpha / 4) / math.sqrt(each / pairs[-1])) for each in pairs]
    return [float(each) for each in np.diff([0.0, *spent])]


def looks(study: Study) -> list[Look]:
    """The looks, of which the last one has all pairs. Raises UserError for one so early that its level can't be drawn."""
    pairs = (*study.looks, study.seeds)
    of_levels = zip(pairs, levels(pairs), strict=True)
    every = [Look(each, level, max(DRAWS, math.ceil(BEYOND / level))) for each, level in of_levels]
    allowed = f"a later first look: the level after {pairs[0]} of {study.seeds} pairs is {every[0].level:.1e}"
    require(every[0].draws <= MOST_DRAWS, "looks", study.looks, allowed)
    return every


def pairs_of_arms(ladder: Ladder, results: Results) -> dict[str, int]:
    """The pairs of runs that each arm needs, as far as the results say."""
    every = looks(ladder.study)
    pairs = dict.fromkeys(arms(ladder.study), every[0].pairs)
    for look, following in pairwise(every):
        if ladder.expected(results, pairs):
            break
        names = compared(ladder.study)
        seen = evidence(ladder, results, pairs, look)
        unknown_A = np.isnan(seen.differences_ARN).any((1, 2))
        open_A = (verdicts(seen.intervals(look), ladder.study.margin, look.level) == "undecided").any(1) & ~unknown_A
        more = [name for name, is_open in zip(names, open_A, strict=True) if is_open and pairs[name] == look.pairs]
        if not more:
            break
        pairs |= dict.fromkeys((ladder.study.baseline, *more), following.pairs)
    return pairs


def compared(study: Study) -> list[str]:
    """The arms beside the baseline."""
    return [arm for arm in study.arms if arm != study.baseline]


def verdicts(estimates: Intervals, margin: float, level: float) -> np.ndarray:
    """[A, C] words: 'equivalent' within the margin, the largest difference that counts as none, also if one is found; else
    'better', 'worse' or 'undecided'."""
    differs = np.where(estimates.p < level, np.where(estimates.mean < 0, "better", "worse"), "undecided")
    return np.where(estimates.p_beyond(margin) < level, "equivalent", differs)


def evidence(
    ladder: Ladder, results: Results, pairs: Mapping[str, int], look: Look, failed: Collection[Cell] = ()
) -> Evidence:
    """What a look sees: its pairs of all arms. An arm that was settled before repeats those that it has, so that it keeps
    its place among the critical values. pairs: those that each arm has."""
    study, names = ladder.study, compared(ladder.study)
    every = [rung.name for rung in rungs(study)]
    had = {arm: min(pairs[arm], look.pairs) for arm in arms(study)}
    values = {Cell(rung, arm): _values(ladder, results, Cell(rung, arm), had[arm]) for rung in every for arm in had}
    differences_ARN = np.full((len(names), len(every), look.pairs), np.nan)
    for at, arm in enumerate(names):
        for number, rung in enumerate(every):
            if not {Cell(rung, arm), Cell(rung, study.baseline)} & set(failed):
                baseline_N = values[Cell(rung, study.baseline)][: had[arm]]
                differences_ARN[at, number] = np.resize(values[Cell(rung, arm)] - baseline_N, look.pairs)
    return Evidence(differences_ARN, _rises(ladder, results, values))


def _values(ladder: Ladder, results: Results, cell: Cell, number: int) -> np.ndarray:
    """[number] results of the runs that decide; NaN for one that diverged, and without a rate."""
    rate = ladder.rate(results, cell)
    trials = [] if rate is None else [Trial(cell, rate, seed) for seed in range(number)]
    values_N = np.array([results[trial] for trial in trials] or [np.nan] * number, np.float64)
    return np.where(np.isfinite(values_N), values_N, np.nan)


def _rises(ladder: Ladder, results: Results, values: Mapping[Cell, np.ndarray]) -> np.ndarray:
    """[B, A, R]: what resampled choices of rates cost the arms more than the baseline."""
    study, every = ladder.study, [rung.name for rung in rungs(ladder.study)]
    tuned, rises = [every[at] for at in ladder.carry.tuned], {}
    deviation_B = rates.drawn_deviations([values[Cell(rung, arm)] for rung in tuned for arm in arms(study)], DRAWS, seed=2)
    for arm in arms(study):
        tried_T = [tried(results, Cell(rung, arm)) for rung in tuned]
        rises[arm] = rates.resampled_rises(tried_T, deviation_B, ladder.carry, study.rate_runs, seed=0)
    rng = np.random.default_rng(1)
    return np.stack([rng.permutation(rises[name]) - rises[study.baseline] for name in compared(study)], 1)


def expected_runs(study: Study, difference: float) -> float:
    """The mean number of runs that decide if all arms differ by `difference`, in simulated studies with the deviation of the
    plan."""
    rng, every = np.random.default_rng(0), looks(study)
    A, R = len(compared(study)), len(rungs(study))
    differences_SARN = difference + study.deviation * rng.standard_normal((SIMULATED, A, R, study.seeds))
    open_SA, pairs_SA = np.ones((SIMULATED, A), bool), np.full((SIMULATED, A), every[0].pairs)
    for look, following in pairwise(every):
        seen_SARN = differences_SARN[..., : look.pairs]
        shared_SAR = shared_variances(seen_SARN.var(-1, ddof=1), look.pairs - 1)
        error_SAR, size_SAR = np.sqrt(shared_SAR / look.pairs), np.abs(seen_SARN.mean(-1))
        critical, inner = typical_critical(A, R, look.pairs, look.level, look.draws)
        settled_SAR = (size_SAR > critical * error_SAR) | (size_SAR + inner * error_SAR < study.margin)
        open_SA = open_SA & ~settled_SAR.all(-1)
        pairs_SA = np.where(open_SA, following.pairs, pairs_SA)
    return R * float((pairs_SA.sum(1) + pairs_SA.max(1)).mean())
