"""Where verdicts are decided: from the results of runs to the words, in the order of this file.

- `pairs_of_arms`: how many pairs of runs each arm needs. After a look (group-sequential tests, config.looks) an arm that has
  a verdict at every rung, or a run that diverged, is settled: it gets no more runs, and keeps the figures of that look.
- `evidence`: the differences of the pairs, and what the choice of rates costs (rates.py). Their intervals hold for all arms
  and rungs at once (simultaneous.py).
- `verdicts_of`: the word at each rung, from these intervals, the margin and the level. `over_ladder`: that of all rungs.
- `shape`: whether a difference changes along the ladder.
- `decide`: the verdicts of a study whose runs have ended, with their figures, as results.json has them.

Letters: arms A, rungs R, pairs of runs N, contrasts C of rungs, axes F along which rungs differ, draws B.

Each look is another chance of a false verdict. So the 5 % of a study are divided among the looks, by the spending function
of Lan and DeMets (1983) in O'Brien and Fleming's form: early looks have little. The levels sum to 5 %, so whatever looks
have in common, the chance of a false verdict or interval in a study is 5 % at most (Bonferroni's inequality). The critical
values of a look are those of all arms, also of the settled ones: arms that go on were not chosen at random.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from scipy import special, stats

from xfresearch.runtime.errors import UserError, require
from xfresearch.studies import rates
from xfresearch.studies.allocation import Cell, Ladder, Results, arms, compared, seeded, tried
from xfresearch.studies.design import Study, rungs
from xfresearch.studies.simultaneous import ALPHA, DRAWS, Intervals, chance_of_equivalent, detectable, intervals

ABOUT = (
    "Intervals, p and verdicts are of the whole study: a false one at any arm and rung has a chance of 5 %. They have the "
    "noise of the runs and that of the choice of learning rates. Differences are those of the metrics less what the choice "
    "of rates costs the arm more than the baseline (the rise)."
)
BEYOND = 20  # drawn studies beyond a critical value, on average
MOST_DRAWS = 50_000
CONFIDENCE, RESAMPLES = 0.95, 2000  # of the intervals of single arms, from pairs alone
AXES = ("sizes", "budgets")  # along sizes at equal tokens for each parameter, and along budgets at equal sizes
LEAST_SPREAD = 1.3  # times the smallest rung that the largest one must be, along an axis, for a change along it
ROUNDING = 1e-12  # relative to the values of runs: differences that vary less are equal
Shape = Literal["grows", "shrinks", "rises", "falls", "stays", "unknown"]


class Look(NamedTuple):
    """A look after so many pairs of runs, at this level, with critical values from so many drawn studies."""

    pairs: int
    level: float
    draws: int


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
        seen = evidence(ladder, results, pairs, look)
        unknown_A = np.isnan(seen.differences_ARN).any((1, 2))
        words_AR = verdicts_of(seen.intervals(look), ladder.study.margin, look.level)
        open_A = (words_AR == "undecided").any(1) & ~unknown_A
        named = zip(compared(ladder.study), open_A, strict=True)
        more = [name for name, is_open in named if is_open and pairs[name] == look.pairs]
        if not more:
            break
        pairs |= dict.fromkeys((ladder.study.baseline, *more), following.pairs)
    return pairs


class Evidence(NamedTuple):
    """Differences of arms A from the baseline at rungs R for pairs N, NaN where one failed, and what resampled choices B of
    rates cost the arms more than the baseline."""

    differences_ARN: np.ndarray
    rises_BAR: np.ndarray

    def intervals(self, look: Look, contrasts_CR: np.ndarray | None = None) -> Intervals:
        return intervals(self.differences_ARN, contrasts_CR, self.rises_BAR, look.level, look.draws)


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
    trials = [] if rate is None else seeded(cell, rate, number)
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


def verdicts_of(estimates: Intervals, margin: float, level: float) -> np.ndarray:
    """[A, C] words: 'equivalent' within the margin, the largest difference that counts as none, also if one is found; else
    'better', 'worse' or 'undecided'."""
    differs = np.where(estimates.p < level, np.where(estimates.mean < 0, "better", "worse"), "undecided")
    return np.where(estimates.p_beyond(margin) < level, "equivalent", differs)


def over_ladder(verdicts_R: Sequence[str]) -> str:
    """The verdict that all rungs have; 'mixed' if decided ones contradict each other; else 'undecided'."""
    verdicts = set(verdicts_R)
    if len(verdicts) == 1:
        return verdicts.pop()
    return "mixed" if len(verdicts - {"undecided"}) > 1 else "undecided"


def change_contrasts(axes_RF: np.ndarray) -> np.ndarray:
    """[F, R]: weights of the differences at the rungs R whose sum is the change along each of the axes F, from the smallest
    to the largest rung, at equal values of the other axes (least squares). axes_RF: the log of the quantities in which rungs
    differ. An axis along which rungs do not differ, or that follows from the others, has zeros."""
    centred_RF = axes_RF - axes_RF.mean(0)
    spread_F = np.ptp(axes_RF, axis=0)
    used = [axis for axis in range(axes_RF.shape[1]) if spread_F[axis] >= math.log(LEAST_SPREAD)]
    while used and np.linalg.matrix_rank(centred_RF[:, used], tol=1e-6) < len(used):
        used.pop()
    contrasts_FR = np.zeros(axes_RF.T.shape)
    if used:
        contrasts_FR[used] = np.linalg.pinv(centred_RF[:, used]) * spread_F[used, None]
    return contrasts_FR


def shape(mean: float, change: float, low: float, high: float, inner: tuple[float, float], margin: float) -> Shape:
    """Of a difference whose mean over the ladder is `mean`, and that changes by `change` (low to high) along it. inner: the
    one-sided bounds of the change. 'stays' if they are within the margin, which is the largest that counts as none. A
    difference that changes its sign, which makes a gain a cost, neither grows nor shrinks."""
    if -margin < inner[0] and inner[1] < margin:
        return "stays"
    if low <= 0 <= high:
        return "unknown"
    first, last = mean - change / 2, mean + change / 2
    less, more = sorted((abs(first), abs(last)))
    if first * last < 0 and less > more / 5:  # nearer to 0, it has vanished
        return "rises" if change > 0 else "falls"
    return "grows" if abs(last) > abs(first) else "shrinks"


def changes(estimates: Intervals, arm: int, mean: float, margin: float) -> dict[str, dict]:
    """{axis: change, its interval, its p and its shape} of an arm, of the intervals of `change_contrasts`."""
    lines = {}
    for at, axis in enumerate(AXES):
        if estimates.error[arm, at] > 0:
            change, low, high = (float(each[arm, at]) for each in (estimates.mean, estimates.low, estimates.high))
            inner = float(estimates.inner_low[arm, at]), float(estimates.inner_high[arm, at])
            word = shape(mean, change, low, high, inner, margin)
            lines[axis] = {"change": change, "low": low, "high": high, "p": float(estimates.p[arm, at]), "shape": word}
    return lines


class Seen(NamedTuple):
    """The intervals of a look: of each rung, of the mean over the ladder, and of changes along it."""

    look: Look
    rungs: Intervals
    whole: Intervals
    changes: Intervals


def decide(
    ladder: Ladder, sizes: Mapping[str, dict], values: Results, pairs: Mapping[str, int], axes_RF: np.ndarray
) -> dict:
    """Adds differences and verdicts to the arms of each rung, and returns the verdicts over the ladder. pairs: {arm: its
    number of pairs}, which tells the look at which the arm was settled. axes_RF: the log of the quantities in which rungs
    differ (AXES)."""
    study = ladder.study
    failed = [Cell(rung, name) for rung, here in sizes.items() for name in here["failures"]]
    seen = {
        look.pairs: _seen(evidence(ladder, values, pairs, look, failed), look, axes_RF)
        for look in looks(study)
        if look.pairs <= pairs[study.baseline]
    }
    over = {}
    for at, name in enumerate(compared(study)):
        of_arm = seen[pairs[name]]
        look = {"look": {"pairs": of_arm.look.pairs, "level": of_arm.look.level}} if study.looks else {}
        words_R = verdicts_of(of_arm.rungs, study.margin, of_arm.look.level)[at]
        for rung, here in enumerate(sizes.values()):
            if math.isfinite(of_arm.rungs.mean[at, rung]):
                arm = here["arms"][name]
                arm |= _of_rung(study, of_arm.rungs, at, rung, arm, here["arms"][study.baseline])
                arm |= {"verdict": str(words_R[rung])} | look
        if math.isfinite(of_arm.whole.mean[at, 0]):  # it failed at no rung
            over[name] = {"verdict": over_ladder(list(map(str, words_R)))} | _of_ladder(study, of_arm, at, axes_RF) | look
    last = seen[max(seen)]
    for rung, here in enumerate(sizes.values()):
        here |= _power(study, last, rung)
    return {
        "statistics": ABOUT,
        "ladder": over,
        "critical": {"two_sided": last.rungs.critical, "one_sided": last.rungs.inner_critical},
    }


def _seen(known: Evidence, look: Look, axes_RF: np.ndarray) -> Seen:
    mean_1R = np.full((1, len(axes_RF)), 1 / len(axes_RF))
    each = (known.intervals(look, contrasts) for contrasts in (None, mean_1R, change_contrasts(axes_RF)))
    return Seen(look, *each)


def _of_rung(study: Study, estimates: Intervals, at: int, rung: int, arm: Mapping, baseline: Mapping) -> dict:
    """The difference of an arm at a rung: of the pairs, and with the interval of the whole study."""
    of_pairs = paired(arm["values"], baseline["values"][: len(arm["values"])])
    ends = {name: float(getattr(estimates, name)[at, rung]) for name in ("mean", "low", "high", "error")}
    measured = {"measured": of_pairs.mean, "rise": of_pairs.mean - ends["mean"]}
    beyond, worse = estimates.p_beyond(study.margin)[at, rung], estimates.p_worse(study.margin)[at, rung]
    p_values = {"p_corrected": estimates.p[at, rung], "p_equivalent": beyond, "p_no_worse": worse}
    return {"difference": of_pairs._asdict() | ends | measured} | {name: float(p) for name, p in p_values.items()}


def _of_ladder(study: Study, seen: Seen, at: int, axes_RF: np.ndarray) -> dict:
    """The figures of an arm over all rungs."""
    whole = seen.whole
    mean, low, high = (float(each[at, 0]) for each in (whole.mean, whole.low, whole.high))
    by_axis = changes(seen.changes, at, mean, study.margin)
    for axis, each in by_axis.items():
        at_R = np.exp(axes_RF[:, AXES.index(axis)])
        each |= {"first": float(at_R.min()), "last": float(at_R.max())}
    # As the verdict, what is said of the margin is said of every rung.
    p_values = {"p_corrected": float(whole.p[at, 0]), "p_no_worse": float(seen.rungs.p_worse(study.margin)[at].max())}
    return {"difference": {"mean": mean, "low": low, "high": high}, "changes": by_axis} | p_values


def _power(study: Study, seen: Seen, rung: int) -> dict[str, float]:
    """The smallest difference that the pairs of a rung can find, for the arm whose differences vary most; {} without
    arms."""
    estimates = seen.rungs
    if np.isnan(estimates.error[:, rung]).all():
        return {}
    error = float(np.nanmax(estimates.error[:, rung]))
    smallest = detectable(error, estimates.critical)
    return {
        "error": error,
        "detectable": smallest,
        "chance_of_equivalent": chance_of_equivalent(study.margin, error, estimates.inner_critical),
        "seeds_for_margin": max(2, math.ceil(seen.look.pairs * (smallest / study.margin) ** 2)),
    }


class Difference(NamedTuple):
    """The mean difference of n pairs, with the interval of the t test, the bootstrap interval (BCa; too narrow for few
    pairs), and p of no difference. No verdict follows from these: they are of one arm."""

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
    rng, options = np.random.default_rng(0), {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "BCa"}
    ends = stats.bootstrap((d_N,), np.mean, rng=rng, **options).confidence_interval
    correlation = float(np.corrcoef(a_N, b_N)[0, 1]) if a_N.std() and b_N.std() else 0.0
    figures = mean, low, high, *ends, test.pvalue, deviation, correlation, unpaired
    return Difference(len(d_N), *map(float, figures))
