"""The verdicts of a study: of each arm at each rung, over the whole ladder, and on how the difference changes along it."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xfresearch.studies import growth, statistics
from xfresearch.studies.cells import Cell, Ladder, Results
from xfresearch.studies.design import Study
from xfresearch.studies.interim import Evidence, Look, compared, evidence, looks, verdicts
from xfresearch.studies.simultaneous import Intervals, chance_of_equivalent, detectable

ABOUT = (
    "Intervals, p and verdicts are of the whole study: a false one at any arm and rung has a chance of 5 %. They have the "
    "noise of the runs and that of the choice of learning rates. Differences are those of the metrics less what the choice "
    "of rates costs the arm more than the baseline (the rise)."
)
BEYOND = 4.0  # times the parameters and tokens of the last rung, for the law


class Found(NamedTuple):
    """The intervals of a look: of each rung, of the mean over the ladder, and of changes along it."""

    look: Look
    rungs: Intervals
    whole: Intervals
    changes: Intervals

    def words(self, margin: float) -> np.ndarray:
        """[A, R]: the verdicts."""
        return verdicts(self.rungs, margin, self.look.level)


def decide(
    ladder: Ladder, sizes: Mapping[str, dict], values: Results, pairs: Mapping[str, int], axes_RF: np.ndarray
) -> dict:
    """Adds differences and verdicts to the arms of each rung, and returns the verdicts over the ladder. pairs: {arm: its
    number of pairs}, which tells the look at which the arm was settled. axes_RF: the log of the quantities in which rungs
    differ (growth.AXES)."""
    study, names = ladder.study, compared(ladder.study)
    failed = [Cell(rung, name) for rung, here in sizes.items() for name in here["failures"]]
    found = {
        look.pairs: _found(evidence(ladder, values, pairs, look, failed), look, axes_RF)
        for look in looks(study)
        if look.pairs <= pairs[study.baseline]
    }
    arms = {}
    for at, name in enumerate(names):
        of_arm, about = found[pairs[name]], _about(study, found[pairs[name]].look)
        words_R = of_arm.words(study.margin)[at]
        for rung, here in enumerate(sizes.values()):
            if math.isfinite(of_arm.rungs.mean[at, rung]):
                arm = here["arms"][name]
                arm |= _of_rung(study, of_arm.rungs, at, rung, arm, here["arms"][study.baseline])
                arm |= {"verdict": str(words_R[rung])} | about
        said = [here["arms"][name].get("verdict", "") for here in sizes.values()]
        arms[name] = _of_ladder(study, said, at, of_arm, axes_RF)
        arms[name] |= about if arms[name] else {}
    last = found[max(found)]
    for rung, here in enumerate(sizes.values()):
        here |= _power(study, last, rung)
    return {
        "statistics": ABOUT,
        "ladder": {name: each for name, each in arms.items() if each},
        "critical": {"two_sided": last.rungs.critical, "one_sided": last.rungs.inner_critical},
        "laws": _laws(study, sizes),
        "notes": [],
    }


def _found(seen: Evidence, look: Look, axes_RF: np.ndarray) -> Found:
    mean_1R = np.full((1, len(axes_RF)), 1 / len(axes_RF))
    each = (seen.intervals(look, contrasts) for contrasts in (None, mean_1R, growth.change_contrasts(axes_RF)))
    return Found(look, *each)


def _about(study: Study, look: Look) -> dict:
    """{"look": the pairs and the level of the look that gave an arm's verdict}; {} for a study without looks."""
    return {"look": {"pairs": look.pairs, "level": look.level}} if study.looks else {}


def _of_rung(study: Study, estimates: Intervals, at: int, rung: int, arm: Mapping, baseline: Mapping) -> dict:
    """The difference of an arm at a rung: of the pairs, and with the interval of the whole study."""
    of_pairs = statistics.paired(arm["values"], baseline["values"][: len(arm["values"])])
    ends = {name: float(getattr(estimates, name)[at, rung]) for name in ("mean", "low", "high", "error")}
    measured = {"measured": of_pairs.mean, "rise": of_pairs.mean - ends["mean"]}
    beyond, worse = estimates.p_beyond(study.margin)[at, rung], estimates.p_worse(study.margin)[at, rung]
    p_values = {"p_corrected": estimates.p[at, rung], "p_equivalent": beyond, "p_no_worse": worse}
    return {"difference": of_pairs._asdict() | ends | measured} | {name: float(p) for name, p in p_values.items()}


def _power(study: Study, found: Found, rung: int) -> dict[str, float]:
    """The smallest difference that the pairs of a rung can find, for the arm whose differences vary most; {} without
    arms."""
    estimates = found.rungs
    if np.isnan(estimates.error[:, rung]).all():
        return {}
    error = float(np.nanmax(estimates.error[:, rung]))
    seeds = found.look.pairs * (detectable(error, estimates.critical) / study.margin) ** 2
    return {
        "error": error,
        "detectable": detectable(error, estimates.critical),
        "chance_of_equivalent": chance_of_equivalent(study.margin, error, estimates.inner_critical),
        "seeds_for_margin": max(2, math.ceil(seeds)),
    }


def _of_ladder(study: Study, said: list[str], at: int, found: Found, axes_RF) -> dict:
    """The verdict on an arm over all rungs; {} if it failed at one of them. said: its verdicts at each rung."""
    whole, verdict = found.whole, growth.over_ladder(said)
    if math.isnan(whole.mean[at, 0]):
        return {}
    mean, low, high = (float(each[at, 0]) for each in (whole.mean, whole.low, whole.high))
    by_axis = growth.changes(found.changes, at, mean, study.margin)
    for axis, each in by_axis.items():
        at_R = np.exp(axes_RF[:, growth.AXES.index(axis)])
        each |= {"first": float(at_R.min()), "last": float(at_R.max())}
    # As the verdict, what is said of the margin is said of every rung.
    p_values = {"p_corrected": float(whole.p[at, 0]), "p_no_worse": float(found.rungs.p_worse(study.margin)[at].max())}
    return {"verdict": verdict, "difference": {"mean": mean, "low": low, "high": high}, "changes": by_axis} | p_values


def _laws(study: Study, sizes: Mapping[str, dict]) -> dict:
    """{arm: the law of its losses, and its difference from the baseline's beyond the ladder}; {} if rungs are too few."""
    baselines = [here["arms"][study.baseline] for here in sizes.values()]
    N_R, D_R = (np.array([arm[name] for arm in baselines], np.float64) for name in ("parameters", "tokens"))
    if not growth.has_law(N_R, D_R) or any(here["failures"] for here in sizes.values()):
        return {}
    rng, laws = np.random.default_rng(0), {}
    for name in study.arms:
        each_R = [here["arms"][name] for here in sizes.values()]
        mean_R = np.array([arm["mean"] for arm in each_R])
        number = len(each_R[0]["values"])
        error_R = np.sqrt(np.mean([arm["deviation"] ** 2 for arm in each_R]) / number) * np.ones(len(mean_R))
        error_R = np.maximum(error_R, 1e-9)
        losses_SR = mean_R + error_R * np.concatenate([np.zeros((1, len(mean_R))), rng.standard_normal((200, len(mean_R)))])
        laws[name] = growth.fit_law(N_R, D_R, losses_SR, error_R)
    N, D = BEYOND * N_R[-1], BEYOND * D_R[-1]
    return {name: _of_law(law, laws[study.baseline], N, D) for name, law in laws.items()}


def _of_law(law: growth.Law, baseline: growth.Law, N: float, D: float) -> dict:
    difference_S = law.at(N, D) - baseline.at(N, D)
    low, high = np.quantile(difference_S[1:], (0.025, 0.975))
    beyond = {"parameters": N, "tokens": D, "difference": difference_S[0], "low": low, "high": high}
    figures = {name: float(each[0]) for name, each in law._asdict().items()}
    return figures | {"beyond": {key: float(value) for key, value in beyond.items()}}
