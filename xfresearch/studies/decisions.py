"""The verdicts of a study: of each arm at each rung, of the ladder, and of what a difference does along it."""

import math
from collections.abc import Mapping

import numpy as np

from xfresearch.studies import growth, rates, statistics
from xfresearch.studies.cells import Cell, Ladder, Results, tried
from xfresearch.studies.design import Study, rungs
from xfresearch.studies.simultaneous import ALPHA, DRAWS, Intervals, chance_of_equivalent, detectable, intervals

ABOUT = (
    "Intervals, p and verdicts are of the whole study: a false one at any arm and rung has a chance of 5 %. They have the "
    "noise of the runs and that of the choice of learning rates."
)
BEYOND = 4.0  # times the parameters and tokens of the last rung, for the law


def decide(ladder: Ladder, sizes: Mapping[str, dict], values: Results, axes_RF: np.ndarray) -> dict:
    """Adds differences and verdicts to the arms of each rung, and returns what the ladder shows. axes_RF: what rungs differ
    in (growth.AXES)."""
    study = ladder.study
    names = [arm for arm in study.arms if arm != study.baseline]
    differences_ARN = _differences(ladder, sizes, names)
    rises_BAR = _rises(ladder, sizes, names, values)
    estimates = intervals(differences_ARN, rises_BAR=rises_BAR)
    beyond, worse = estimates.p_beyond(study.margin), estimates.p_worse(study.margin)
    for rung, here in enumerate(sizes.values()):
        for at, name in enumerate(names):
            if math.isfinite(estimates.mean[at, rung]):
                arm = here["arms"][name]
                arm |= _of_rung(estimates, at, rung, arm, here["arms"][study.baseline])
                arm["p_equivalent"], arm["p_no_worse"] = float(beyond[at, rung]), float(worse[at, rung])
                arm["verdict"] = _verdict(arm)
        here |= _power(study, estimates, rung)
    changes = intervals(differences_ARN, growth.change_contrasts(axes_RF), rises_BAR)
    whole = intervals(differences_ARN, np.full((1, len(sizes)), 1 / len(sizes)), rises_BAR)
    arms = {}
    for at, name in enumerate(names):
        verdicts = [here["arms"][name].get("verdict", "") for here in sizes.values()]
        arms[name] = _of_ladder(study, verdicts, at, whole, changes, axes_RF)
    return {
        "statistics": ABOUT,
        "ladder": {name: each for name, each in arms.items() if each},
        "critical": {"two_sided": estimates.critical, "one_sided": estimates.inner_critical},
        "laws": _laws(study, sizes),
        "notes": [],
    }


def _differences(ladder: Ladder, sizes: Mapping[str, dict], names: list[str]) -> np.ndarray:
    """[A, R, N], NaN where an arm or the baseline failed."""
    study = ladder.study
    differences_ARN = np.full((len(names), len(sizes), study.seeds), np.nan)
    for rung, here in enumerate(sizes.values()):
        for at, name in enumerate(names):
            if not {name, study.baseline} & here["failures"].keys():
                differences_ARN[at, rung] = np.subtract(here["arms"][name]["values"], here["arms"][study.baseline]["values"])
    return differences_ARN


def _rises(ladder: Ladder, sizes: Mapping[str, dict], names: list[str], values: Results) -> np.ndarray:
    """[B, A, R]: what resampled choices of rates cost the arms more than the baseline."""
    study, every = ladder.study, [rung.name for rung in rungs(ladder.study)]

    def of(arm: str) -> np.ndarray:
        tuned = [every[at] for at in ladder.carry.tuned]
        tried_T = [tried(values, Cell(rung, arm)) for rung in tuned]
        deviation_T = [sizes[rung]["arms"][arm]["deviation"] for rung in tuned]
        known_T = [0.0 if math.isnan(each) else each for each in deviation_T]
        return rates.resampled_rises(tried_T, known_T, ladder.carry, study.rate_runs, DRAWS, seed=0)

    baseline_BR = of(study.baseline)
    rng = np.random.default_rng(1)
    return np.stack([rng.permutation(of(name)) - baseline_BR for name in names], 1)


def _of_rung(estimates: Intervals, at: int, rung: int, arm: Mapping, baseline: Mapping) -> dict:
    """The difference of an arm at a rung: of the pairs, and with the interval of the whole study."""
    of_pairs = statistics.paired(arm["values"], baseline["values"])
    ends = {name: float(getattr(estimates, name)[at, rung]) for name in ("mean", "low", "high", "error")}
    measured = {"measured": of_pairs.mean, "rise": of_pairs.mean - ends["mean"]}
    return {"difference": of_pairs._asdict() | ends | measured, "p_corrected": float(estimates.p[at, rung])}


def _verdict(arm: Mapping) -> str:
    """'equivalent' within the margin, also if a difference is found: the margin is the largest that counts as none."""
    if arm["p_equivalent"] < ALPHA:
        return "equivalent"
    if arm["p_corrected"] < ALPHA:
        return "better" if arm["difference"]["mean"] < 0 else "worse"
    return "undecided"


def _power(study: Study, estimates: Intervals, rung: int) -> dict[str, float]:
    """What the pairs of a rung can find, of the arm whose differences vary most. {} without any."""
    if np.isnan(estimates.error[:, rung]).all():
        return {}
    error = float(np.nanmax(estimates.error[:, rung]))
    seeds = study.seeds * (detectable(error, estimates.critical) / study.margin) ** 2
    return {
        "error": error,
        "detectable": detectable(error, estimates.critical),
        "chance_of_equivalent": chance_of_equivalent(study.margin, error, estimates.inner_critical),
        "seeds_for_margin": max(2, math.ceil(seeds)),
    }


def _of_ladder(study: Study, verdicts: list[str], at: int, whole: Intervals, changes: Intervals, axes_RF) -> dict:
    """What an arm shows over all rungs; {} if it failed at one of them."""
    if math.isnan(whole.mean[at, 0]):
        return {}
    verdict = growth.over_ladder(verdicts)
    mean, low, high = (float(each[at, 0]) for each in (whole.mean, whole.low, whole.high))
    by_axis = growth.changes(changes, at, mean, study.margin)
    for axis, each in by_axis.items():
        at_R = np.exp(axes_RF[:, growth.AXES.index(axis)])
        each |= {"first": float(at_R.min()), "last": float(at_R.max())}
    p_values = {"p_corrected": float(whole.p[at, 0]), "p_no_worse": float(whole.p_worse(study.margin)[at, 0])}
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
        error_R = np.sqrt(np.mean([arm["deviation"] ** 2 for arm in each_R]) / study.seeds) * np.ones(len(mean_R))
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
