"""Groups of runs that differ only in the seed, so that a comparison is about a change and not about one seed.

The loss of a group is the mean over its runs, with Student's interval over seeds. The difference of two groups has the
interval and the test of Welch (1947), which needs two seeds of each. With one seed there is no verdict on the change.
"""

import math

import numpy as np

from xfresearch.comparing.pairing import CONFIDENCE, correct, of_runs
from xfresearch.comparing.runs import ComparedRun, options
from xfresearch.runtime.summaries import mean_interval

WELCH = "Welch"
SAME_COST = 0.01  # relative: FLOPs of training that differ by more are not equal


def grouped(each: list[ComparedRun]) -> list[list[ComparedRun]]:
    """The runs in groups, in the order of their first runs. Runs of one group have equal options but for the seed, and as
    many steps; no seed is in a group twice. A model without a run is a group alone."""
    members: dict[tuple, list[ComparedRun]] = {}
    for number, run in enumerate(each):
        same = {path: repr(leaf.value) for path, leaf in options(run).items() if path != "seed"}
        key = (*sorted(same.items()), run.rows[-1]["step"], run.step) if run.rows else (number,)
        again = run.config.seed in {other.config.seed for other in members.get(key, ())}
        members.setdefault((*key, number) if again else key, []).append(run)
    return list(members.values())


def compare(each: list[ComparedRun], summaries: dict[str, dict], margin: float) -> list[dict]:
    """A dict for each group: its runs, seeds and losses, their `mean` (None without losses), `half`, the half width of the
    mean's interval, and `flops` of training relative to the first group (None if unknown). Mean and half are NaN if a loss
    is: that run diverged. Groups after the first one have the `difference` of means and a `verdict`, and with at least two
    seeds of both groups the interval and p. `summaries` has each run's costs and held-out loss."""
    compared: list[dict] = []
    for members in grouped(each):
        paths = [run.path for run in members]
        losses = [summaries[path]["held_out"]["value"] for path in paths if summaries[path]["held_out"]]
        mean, half = (math.nan, math.nan) if any(map(math.isnan, losses)) else mean_interval(losses)
        seeds = [run.config.seed if run.rows else None for run in members]
        known = {"losses": losses, "mean": mean if losses else None, "half": half}
        compared.append({"runs": paths, "seeds": seeds, **known, "flops": _flops(summaries[paths[0]])})
    first = compared[0]
    for group in compared[1:]:
        group |= _difference(group["losses"], first["losses"])
    correct(group for group in compared[1:] if "p" in group)
    for group in compared[1:]:
        group["verdict"] = _words(group, first, margin)
    start = first["flops"]
    for group in compared:
        group["flops"] = group["flops"] / start if group["flops"] and start else None
    return compared


def _flops(summary: dict) -> float | None:
    """The FLOPs of training."""
    return 3 * summary["flops_per_token"] * summary["tokens"] if summary["tokens"] else None


def _difference(losses: list[float], reference: list[float]) -> dict:
    """Welch's difference of two means, with its interval and p if there are at least two losses of each; {} if one of them
    has no losses."""
    if not losses or not reference:
        return {}
    figures = {"difference": float(np.mean(losses) - np.mean(reference)), "reference": float(np.mean(reference))}
    if min(len(losses), len(reference)) < 2:
        return figures
    from scipy.stats import t

    parts = [np.var(values, ddof=1) / len(values) for values in (losses, reference)]
    error = math.sqrt(sum(parts))
    if not error:  # copies of one run
        return figures
    freedom = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (losses, reference), strict=True))
    margin = error * float(t.ppf((1 + CONFIDENCE) / 2, freedom))
    interval = [figures["difference"] - margin, figures["difference"] + margin]
    p = float(2 * t.sf(abs(figures["difference"]) / error, freedom))
    return figures | {"interval": interval, "test": WELCH, "p": p, "lower_is_better": True}


def _words(group: dict, first: dict, margin: float) -> str:
    """The verdict on what distinguishes a group from the first one, and whether their costs are equal."""
    counts = len(group["losses"]), len(first["losses"])
    if "interval" in group:
        words = f"{of_runs('text', group, margin)}, over {counts[0]} and {counts[1]} seeds"
    elif not min(counts):
        words = "none: no held-out loss"
    else:
        words = "none: one seed each" if max(counts) == 1 else f"none: {counts[0]} and {counts[1]} seeds"
    if group["flops"] and first["flops"] and abs(group["flops"] / first["flops"] - 1) > SAME_COST:
        words += f"; with {group['flops'] / first['flops']:.2f} times the FLOPs"
    return words
