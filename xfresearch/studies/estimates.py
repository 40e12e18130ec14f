"""Estimates of each arm at each rung: its metric, noise, sampling error, curve, the cost that it saves at equal loss; and
the law L(N, D) of its losses over the rungs R, with N parameters and D tokens. With the verdicts (verdicts.py) they are the
outcome of a study, one dictionary: results.json, from which its report is made.

A metric is one where less is better. Where SciPy has a method, it is SciPy's.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from xfresearch.comparing.pairing import pair_ratios, ratio
from xfresearch.options.fields import leaves
from xfresearch.run_config.config import Config
from xfresearch.runtime import hardware
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.summaries import mean_interval
from xfresearch.studies import measurement, rates, verdicts
from xfresearch.studies.allocation import Cell, Ladder, Trial, cells, seeded, tried
from xfresearch.studies.design import OF_A_RUN, Rung, Study, described, rungs
from xfresearch.studies.matching import Matched, axes, read_seconds, read_times, tokens
from xfresearch.studies.measurement import deciding, less_is_better, of_frequencies, seconds

BEYOND = 4.0  # times the parameters and tokens of the last rung, for the law
EXPONENTS = np.arange(0.1, 1.0, 0.0125)  # of the law, on a grid
# Kinds of the time of a run that are no overhead.
MEASURED = {"updates": ("step",), "held-out metrics": ("evaluation", "metric"), "probes": ("probes",)}


def outcome_of(
    ladder: Ladder,
    matched: Mapping[Cell, Matched],
    results: Mapping[Trial, dict],
    unigram: Mapping[str, float] | None = None,
    seconds_of_updates: Mapping[Cell, float] | None = None,
) -> dict:
    """The outcome of a study whose runs have all ended. unigram: {rung: metric of a model that knows how frequent each token
    or label is}; an arm that does not beat it has learnt nothing. seconds_of_updates: {cell: seconds of an update}, timed in
    turns with the baseline, so that other work of the machine slows both; without them arms have no seconds. Raises
    UserError if a run is missing, or if runs of a rung read different data."""
    measurement.require_same_data(results)
    study, unigram = ladder.study, unigram or {}
    values = {trial: deciding(study, result) for trial, result in results.items()}
    pairs = verdicts.pairs_of_arms(ladder, values)
    arms = {cell: _arm(ladder, cell, pairs[cell.arm], matched[cell], values, results) for cell in cells(study)}
    for cell, arm in arms.items():
        arm["seconds"] = arm["steps"] * (seconds_of_updates or {}).get(cell, math.nan)
        arm["difference_sampling_error"] = _difference_sampling_error(study, cell, arms, results)
    sizes = {rung.name: _rung(study, rung, arms, unigram.get(rung.name, math.nan)) for rung in rungs(study)}
    decided = verdicts.decide(ladder, sizes, values, pairs, axes(study, matched))
    for here in sizes.values():
        for arm in here["arms"].values():
            arm |= {"saved": _saved(arm, here["arms"][study.baseline])} if "difference" in arm else {}
    return {
        "study": described(study),
        "optimizer": _optimizer(next(iter(matched.values())).config),
        "sizes": sizes,
        **decided,
        "laws": laws(study, sizes),
        "notes": [],
        "versions": [],
        "margin": _margin(study, sizes, results),
        "shares": shares(results.values()),
        "seconds": sum(map(seconds, results.values())),
        "runs": len(results),
        "made": _made([result["made"] for result in results.values()]),
    }


def outcome_of_directory(ladder: Ladder, solved: Mapping[Cell, Matched], results: Mapping[Trial, dict], folder) -> dict:
    """`outcome_of` with the times that a study's directory has, the frequencies of its data, and where it was computed."""
    baselines = {rung.name: solved[Cell(rung.name, ladder.study.baseline)].config for rung in rungs(ladder.study)}
    frequencies = {_held_out_data(config): config for config in baselines.values()}  # rungs may share their data
    known = {data: deciding(ladder.study, {"evaluation": of_frequencies(config)}) for data, config in frequencies.items()}
    unigram = {rung: known[_held_out_data(config)] for rung, config in baselines.items()}
    seconds_of_updates = read_seconds(ladder.study, folder, {cell: each.config for cell, each in solved.items()})
    outcome = outcome_of(ladder, solved, results, unigram, seconds_of_updates)
    outcome["made"]["report"] = [f"{measurement.short_commit(hardware.git_commit())}, {time.strftime('%Y-%m-%d')}"]
    outcome["made"]["timed_on"] = read_times(folder).get("machine", "") if seconds_of_updates else ""
    return outcome


def _held_out_data(config: Config) -> str:
    """A key of the options that decide the frequencies of tokens and the text on which they are measured."""
    return repr((config.data, config.evaluation, config.sequence_length, config.seed, config.model.vocab_size))


def _optimizer(config: Config) -> dict:
    """The options of a run's optimizer, without empty ones and those that a study sets for each run."""
    options = {leaf.path: leaf.value for leaf in leaves(config.optimizer)}
    return {name: value for name, value in options.items() if value != () and f"optimizer.{name}" not in OF_A_RUN}


def _made(each: Sequence[Mapping]) -> dict[str, list[str]]:
    """Lines 'number of runs: commit, date, machine' of where runs were trained, the versions of libraries, and how many runs
    shared a program."""
    machines = [measurement.machine_in_words(made["machine"]) for made in each]
    made_by = zip(each, machines, strict=True)
    lines = [f"{measurement.short_commit(made['commit'])}, {made['date']}, {machine}" for made, machine in made_by]
    versions = [", ".join(f"{name} {version}" for name, version in made["versions"].items()) for made in each]
    counted = [f"{lines.count(line)}: {line}" for line in dict.fromkeys(lines)]
    shared = sum("together" in made for made in each)
    words = f"{shared} runs shared a program with others of their cell: they are runs alone but for roundings"
    return {"runs": counted, "versions": [*dict.fromkeys(versions)]} | ({"together": [words]} if shared else {})


def _arm(
    ladder: Ladder,
    cell: Cell,
    pairs: int,
    matched: Matched,
    values: Mapping[Trial, float],
    results: Mapping[Trial, dict],
) -> dict:
    """One arm at one rung."""
    study, losses, rate = ladder.study, tried(values, cell), ladder.rate(values, cell)
    if rate is None and all(not ladder.tuning(values, each) for each in ladder.sources(cell)):
        return _diverged(losses, matched)
    trials = seeded(cell, math.nan if rate is None else rate, pairs)
    missing = [trial.folder for trial in trials if trial not in values]
    if missing:
        raise UserError(f"the study has no result of {', '.join(missing)}: run it again, and it goes on there")
    metric = [values[trial] for trial in trials]
    probes = [results[trial].get("probes", {}) for trial in trials]
    return {
        "rate": rate,
        "tried": losses,
        "edge": rates.at_edge(rates.means(losses)) if losses else "",
        "values": metric,
        "mean": float(np.mean(metric)),
        "deviation": float(np.std(metric, ddof=1)),
        "diverged": [trial.folder for trial in trials if not math.isfinite(values[trial])],
        "sampling_error": float(np.mean([_sampling_error(results[trial]) for trial in trials])),
        "probes": {name: [each.get(name, math.nan) for each in probes] for name in study.probes},
        "curve": _curve([results[trial].get("curve", []) for trial in trials], study.metric),
        **_cost(matched),
    }


def _cost(matched: Matched) -> dict:
    """The costs of an arm, and the option that was solved for."""
    return {
        "parameters": matched.parameters,
        "training_flops": matched.training_flops,
        "steps": matched.config.steps,
        "tokens": int(tokens(matched.config)),
        "solved": matched.solved,
        "mismatch": matched.mismatch,
    }


def _blocks(results: Iterable[Mapping]) -> tuple[np.ndarray, np.ndarray]:
    """Values and sizes of the metric in blocks of the held-out data [B], summed over runs (measurement.blocks)."""
    each = [result["blocks"] for result in results]
    values, sizes = (np.array([blocks[name] for blocks in each], np.float64).sum(0) for name in ("values", "sizes"))
    return values, sizes


def _sampling_error(result: Mapping) -> float:
    """The standard error of the metric of a run by the size of the held-out data; NaN for a run that diverged."""
    return ratio(*_blocks([result]))["standard_error"] if "blocks" in result else math.nan


def _difference_sampling_error(study: Study, cell: Cell, arms: Mapping[Cell, dict], results: Mapping[Trial, dict]) -> float:
    """The standard error of an arm's mean difference by the size of the held-out data. All runs share the data, so the
    effect of a text on both sides of the difference cancels. NaN with a run that diverged."""
    pairs = len(arms[cell]["values"])
    sides = [seeded(each, arms[each]["rate"], pairs) for each in (cell, Cell(cell.rung, study.baseline))]
    if not pairs or any("blocks" not in results.get(trial, {}) for side in sides for trial in side):
        return math.nan
    return pair_ratios(*(_blocks(results[trial] for trial in side) for side in sides))["standard_error"]


def _diverged(losses: rates.Tried, matched: Matched) -> dict:
    """An arm that diverged at every learning rate."""
    unknown: dict = dict.fromkeys(("rate", "mean", "deviation", "sampling_error"), math.nan)
    unknown |= {"edge": "", "values": [], "probes": {}, "curve": [], "tried": losses, "diverged": ["every learning rate"]}
    return unknown | _cost(matched)


def _curve(curves: list, metric: str) -> list[tuple[float, float, float]]:
    """(update, mean of the metric over seeds, half width of its interval) of each evaluation that all runs have, where less
    is better."""
    by_step = [{step: less_is_better(metric, value) for step, value in curve} for curve in curves]
    shared = sorted(set.intersection(*map(set, by_step))) if by_step else []
    return [(step, *mean_interval([each[step] for each in by_step])) for step in shared]


def _rung(study: Study, rung: Rung, arms: Mapping[Cell, dict], unigram: float) -> dict:
    """All arms at one rung."""
    here = {cell.arm: arm for cell, arm in arms.items() if cell.rung == rung.name}
    baseline = here[study.baseline]
    failures = {name: reason for name, arm in here.items() if (reason := _failure(arm, unigram))}
    for arm in here.values():
        losses = {rate: value for rate, value in rates.means(arm["tried"]).items() if rate in study.rates}
        known = math.isfinite(unigram) and losses
        arm["sensitivity"] = sensitivity(losses, unigram) if known else math.nan
    return {
        "size": rung.size,
        "budget": rung.budget,
        "arms": here,
        "failures": failures,
        "noise": noise(baseline["values"]) if study.baseline not in failures else None,
        "sampling_error": baseline["sampling_error"],
        "unigram": unigram,
    }


def _margin(study: Study, sizes: Mapping[str, dict], results: Mapping[Trial, dict]) -> dict:
    """The margin in nats per token, and the share of tokens more that is worth as much to the baseline at each size (None if
    it has one budget)."""
    known = [each["evaluation"] for each in results.values() if each["evaluation"].get("bytes")]
    nats = study.margin if study.metric == "loss" else None
    if study.metric == "bits_per_byte" and known:
        nats = study.margin * math.log(2) * known[0]["bytes"] / known[0]["tokens"]
    worth = {}
    for size in study.sizes:
        of_size = [each for each in sizes.values() if each["size"] == size and study.baseline not in each["failures"]]
        losses = {each["arms"][study.baseline]["tokens"]: each["arms"][study.baseline]["mean"] for each in of_size}
        worth[size] = tokens_worth(losses, study.margin) if losses else None
    return {"nats_per_token": nats, "tokens_worth": worth}


def points(arm: Mapping, axis: str) -> np.ndarray:
    """[points, 3]: the curve of an arm by 'training_flops' or 'seconds', the metric, and the half width of its interval."""
    curve_P3 = np.array(arm["curve"], np.float64).reshape(-1, 3)
    return curve_P3 * np.array([arm[axis] / arm["steps"], 1, 1])


def _saved(arm: Mapping, baseline: Mapping) -> dict[str, tuple[float, float]]:
    """{axis: the share of the baseline's cost that the arm saves at the baseline's last metric, and the reverse}."""
    known = [axis for axis in ("training_flops", "seconds") if math.isfinite(arm[axis] + baseline[axis])]
    axes = known if arm["curve"] and baseline["curve"] else ()
    return {axis: saved_at_equal_loss(points(arm, axis)[:, :2], points(baseline, axis)[:, :2]) for axis in axes}


def _failure(arm: dict, unigram: float) -> str:
    """Why an arm is not evidence; '' if it is."""
    if arm["diverged"]:
        return f"a run diverged ({', '.join(arm['diverged'])})"
    if arm["mean"] >= unigram:
        return f"it has not learnt: its mean is {arm['mean']:.3f}, and frequencies alone give {unigram:.3f}"
    return ""


def shares(results: Iterable[Mapping]) -> dict[str, float]:
    """The shares of the wall time of the runs: updates, held-out metrics, probes, and the overhead, which is the rest."""
    results = list(results)
    total = sum(map(seconds, results))
    spent = {name: sum(each["seconds"][kind] for each in results for kind in kinds) for name, kinds in MEASURED.items()}
    return {name: value / total for name, value in spent.items()} | {"overhead": 1 - sum(spent.values()) / total}


def noise(values: Sequence[float]) -> tuple[float, float, float]:
    """The standard deviation of runs that differ in their seed alone, and the ends of its interval (chi-squared)."""
    deviation, freedom = float(np.std(values, ddof=1)), len(values) - 1
    low, high = stats.chi2.ppf((0.5 + verdicts.CONFIDENCE / 2, 0.5 - verdicts.CONFIDENCE / 2), freedom)
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
    return _saved_by(arm, baseline), _saved_by(baseline, arm)


def _saved_by(curve: np.ndarray, other: np.ndarray) -> float:
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


def tokens_worth(losses: Mapping[float, float], difference: float) -> float | None:
    """The share of tokens more that lower a loss by `difference`, at the slope of the loss by log tokens between the fewest
    and the most. losses: {tokens: loss} of the baseline at one size. None for one number, or no fall."""
    first, last = min(losses), max(losses)
    if first == last or losses[first] <= losses[last]:
        return None
    slope = (losses[first] - losses[last]) / math.log(last / first)
    return math.expm1(difference / slope)


class Law(NamedTuple):
    """L(N, D) = E + A N^-alpha + B D^-beta (Hoffmann et al. 2022, eq. 10), of S sets of losses. Arrays [S]."""

    E: np.ndarray
    A: np.ndarray
    B: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def at(self, N: float, D: float) -> np.ndarray:
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta


def has_law(N_R: np.ndarray, D_R: np.ndarray) -> bool:
    """Whether rungs are enough for the five numbers of the law, and do not all have one ratio of tokens to parameters."""
    ratios = set(np.round(np.log(D_R / N_R), 2))
    return len(set(N_R)) >= 3 and len(set(D_R)) >= 3 and len(ratios) >= 2 and len(N_R) >= 6


def fit_law(N_R: np.ndarray, D_R: np.ndarray, losses_SR: np.ndarray, error_R: np.ndarray) -> Law:
    """The law with the least squares, weighted by the errors, and A, B of at least 0. With given exponents it is linear, so
    all pairs of them on a grid are solved exactly (variable projection): no start, and no early stop. Where no pair has
    positive A and B, both are 0."""
    scale_N, scale_D = N_R.min(), D_R.min()
    best_S = np.full(len(losses_SR), math.inf)
    best_S5 = np.zeros((len(losses_SR), 5))
    weighted_RS = (losses_SR / error_R).T
    for alpha in EXPONENTS:
        terms_XR3 = np.ones((len(EXPONENTS), len(N_R), 3))
        terms_XR3[..., 1] = (N_R / scale_N) ** -alpha
        terms_XR3[..., 2] = (D_R / scale_D) ** -EXPONENTS[:, None]
        terms_XR3 /= error_R[:, None]
        solved_X3S = np.linalg.pinv(terms_XR3) @ weighted_RS
        square_XS = np.square(weighted_RS - terms_XR3 @ solved_X3S).sum(1)
        square_XS[(solved_X3S[:, 1:] < 0).any(1)] = math.inf
        at_S = square_XS.argmin(0)
        each_S = np.arange(len(at_S))
        better_S = square_XS[at_S, each_S] < best_S
        best_S = np.minimum(best_S, square_XS[at_S, each_S])
        beta_S, (E_S, A_S, B_S) = EXPONENTS[at_S], solved_X3S[at_S, :, each_S].T
        each_S5 = np.stack([E_S, A_S * scale_N**alpha, B_S * scale_D**beta_S, np.full_like(E_S, alpha), beta_S], 1)
        best_S5 = np.where(better_S[:, None], each_S5, best_S5)
    none_S = np.isinf(best_S)
    best_S5[none_S, 0], best_S5[none_S, 3:] = losses_SR[none_S].mean(1), 1.0
    return Law(*best_S5.T)


def laws(study: Study, sizes: Mapping[str, dict]) -> dict:
    """{arm: the law of its losses, and its difference from the baseline's beyond the ladder}; {} if rungs are too few."""
    baselines = [here["arms"][study.baseline] for here in sizes.values()]
    N_R, D_R = (np.array([arm[name] for arm in baselines], np.float64) for name in ("parameters", "tokens"))
    if not has_law(N_R, D_R) or any(here["failures"] for here in sizes.values()):
        return {}
    rng, fitted = np.random.default_rng(0), {}
    for name in study.arms:
        each_R = [here["arms"][name] for here in sizes.values()]
        mean_R = np.array([arm["mean"] for arm in each_R])
        number = len(each_R[0]["values"])
        error_R = np.sqrt(np.mean([arm["deviation"] ** 2 for arm in each_R]) / number) * np.ones(len(mean_R))
        error_R = np.maximum(error_R, 1e-9)
        losses_SR = mean_R + error_R * np.concatenate([np.zeros((1, len(mean_R))), rng.standard_normal((200, len(mean_R)))])
        fitted[name] = fit_law(N_R, D_R, losses_SR, error_R)
    N, D = BEYOND * N_R[-1], BEYOND * D_R[-1]
    return {name: _beyond(law, fitted[study.baseline], N, D) for name, law in fitted.items()}


def _beyond(law: Law, baseline: Law, N: float, D: float) -> dict:
    """The numbers of a law, and its difference from the baseline's at N parameters and D tokens."""
    difference_S = law.at(N, D) - baseline.at(N, D)
    low, high = np.quantile(difference_S[1:], (0.025, 0.975))
    beyond = {"parameters": N, "tokens": D, "difference": difference_S[0], "low": low, "high": high}
    figures = {name: float(each[0]) for name, each in law._asdict().items()}
    return figures | {"beyond": {key: float(value) for key, value in beyond.items()}}
