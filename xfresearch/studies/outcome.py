"""The outcome of a study as one dictionary: results.json, from which its report is made, and which docs/ has as JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from xfresearch.comparing.pairing import pair_ratios, ratio
from xfresearch.options.fields import leaves
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.summaries import mean_interval
from xfresearch.studies import decisions, growth, interim, rates, statistics
from xfresearch.studies.cells import Cell, Ladder, Trial, cells, seeded, tried
from xfresearch.studies.design import OF_A_RUN, Rung, Study, described, rungs
from xfresearch.studies.matching import Matched, axes, tokens
from xfresearch.studies.running import deciding, less_is_better, seconds

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
    require_same_data(results)
    study, unigram = ladder.study, unigram or {}
    values = {trial: deciding(study, result) for trial, result in results.items()}
    pairs = interim.pairs_of_arms(ladder, values)
    arms = {cell: _arm(ladder, cell, pairs[cell.arm], matched[cell], values, results) for cell in cells(study)}
    for cell, arm in arms.items():
        arm["seconds"] = arm["steps"] * (seconds_of_updates or {}).get(cell, math.nan)
        arm["difference_sampling_error"] = _difference_sampling_error(study, cell, arms, results)
    sizes = {rung.name: _rung(study, rung, arms, unigram.get(rung.name, math.nan)) for rung in rungs(study)}
    decided = decisions.decide(ladder, sizes, values, pairs, axes(study, matched))
    for here in sizes.values():
        for arm in here["arms"].values():
            arm |= {"saved": _saved(arm, here["arms"][study.baseline])} if "difference" in arm else {}
    return {
        "study": described(study),
        "optimizer": _optimizer(next(iter(matched.values())).config),
        "sizes": sizes,
        **decided,
        "versions": [],
        "margin": _margin(study, sizes, results),
        "shares": shares(results.values()),
        "seconds": sum(map(seconds, results.values())),
        "runs": len(results),
        "made": _made([result["made"] for result in results.values()]),
    }


def _optimizer(config: Config) -> dict:
    """The options of a run's optimizer, without empty ones and those that a study sets for each run."""
    options = {leaf.path: leaf.value for leaf in leaves(config.optimizer)}
    return {name: value for name, value in options.items() if value != () and f"optimizer.{name}" not in OF_A_RUN}


def require_same_data(results: Mapping[Trial, dict]) -> None:
    """Raises UserError if runs of a size, which may come from other machines, have read different data."""
    first: dict[tuple[str, str], str] = {}
    for trial, result in results.items():
        for name, digest in result.get("data", {}).items():  # a run that diverged has none
            other = first.setdefault((trial.cell.rung, name), digest)
            if other != digest:
                raise UserError(
                    f"{trial.folder}: its {name} has the digest {digest[:12]}, and that of the other runs {other[:12]}: all "
                    "runs of a size must read the same data. Use a new directory for the runs with one of the two"
                )


def _made(each: Sequence[Mapping]) -> dict[str, list[str]]:
    """Lines 'number of runs: commit, date, machine' of where runs were trained, the versions of libraries, and how many runs
    shared a program."""
    lines = [f"{short_commit(made['commit'])}, {made['date']}, {machine(made['machine'])}" for made in each]
    versions = [", ".join(f"{name} {version}" for name, version in made["versions"].items()) for made in each]
    counted = [f"{lines.count(line)}: {line}" for line in dict.fromkeys(lines)]
    shared = sum("together" in made for made in each)
    words = f"{shared} runs shared a program with others of their cell: they are runs alone but for roundings"
    return {"runs": counted, "versions": [*dict.fromkeys(versions)]} | ({"together": [words]} if shared else {})


def machine(described: Mapping) -> str:
    """'processor, cores, devices' of hardware.describe_machine, and the precision of products if it was set."""
    precision = described.get("matmul_precision", "default")
    precise = "" if precision == "default" else f", matmul precision {precision}"
    cores = f"{described['cores']} core{'s' if described['cores'] > 1 else ''}"
    return f"{described['cpu']}, {cores}, {described['devices']}{precise}"


def short_commit(commit: str) -> str:
    """The first digits of hardware.git_commit, with its '-dirty'."""
    digits, dash, dirty = commit.partition("-")
    return f"{digits[:7] or 'no commit'}{dash}{dirty}"


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
    """Values and sizes of the metric in blocks of the held-out data [B], summed over runs (running.blocks)."""
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
        arm["sensitivity"] = statistics.sensitivity(losses, unigram) if known else math.nan
    return {
        "size": rung.size,
        "budget": rung.budget,
        "arms": here,
        "failures": failures,
        "noise": statistics.noise(baseline["values"]) if study.baseline not in failures else None,
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
        worth[size] = growth.tokens_worth(losses, study.margin) if losses else None
    return {"nats_per_token": nats, "tokens_worth": worth}


def points(arm: Mapping, axis: str) -> np.ndarray:
    """[points, 3]: the curve of an arm by 'training_flops' or 'seconds', the metric, and the half width of its interval."""
    curve_P3 = np.array(arm["curve"], np.float64).reshape(-1, 3)
    return curve_P3 * np.array([arm[axis] / arm["steps"], 1, 1])


def _saved(arm: Mapping, baseline: Mapping) -> dict[str, tuple[float, float]]:
    """{axis: the share of the baseline's cost that the arm saves at the baseline's last metric, and the reverse}."""
    known = [axis for axis in ("training_flops", "seconds") if math.isfinite(arm[axis] + baseline[axis])]
    axes = known if arm["curve"] and baseline["curve"] else ()
    return {axis: statistics.saved_at_equal_loss(points(arm, axis)[:, :2], points(baseline, axis)[:, :2]) for axis in axes}


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
