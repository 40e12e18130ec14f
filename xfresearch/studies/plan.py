"""The plan of a study, before anything runs: runs, FLOPs, hours, and the smallest difference that it can find."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xfresearch.studies import statistics
from xfresearch.studies.cells import Cell, cells, jobs, planned, tuned
from xfresearch.studies.checks import check
from xfresearch.studies.design import Study, config_of
from xfresearch.studies.matching import Matched, matched
from xfresearch.training.timing import Timer, seconds_per_update

UPDATES = 3  # that are timed


class Plan(NamedTuple):
    matched: dict[Cell, Matched]
    runs: int  # if no best learning rate lies at the edge of the grid
    most_runs: int
    training_flops: float  # of `runs`
    hours: float  # NaN if nothing was timed
    detectable: float  # over all sizes together, the smallest difference that is found with a chance of 80 %
    chance_of_equivalent: float  # of an arm without a difference


def timings(study: Study, known: Mapping[Cell, float]) -> dict[Cell, float]:
    """With match='seconds' those of an update of each cell, otherwise nothing. A cell without a known time, as that of
    an arm that was added, is timed beside the baseline of its size, whose known time stays the measure."""
    missing = [cell for cell in cells(study) if cell not in known] if study.match == "seconds" else []
    if not missing:
        return dict(known)
    baseline_of = {cell: Cell(cell.size, study.baseline) for cell in missing}
    timed_now = dict.fromkeys([*missing, *baseline_of.values()])
    now = seconds_per_update({cell: config_of(study, *cell) for cell in timed_now})
    scale = {baseline: known.get(baseline, now[baseline]) / now[baseline] for baseline in baseline_of.values()}
    return dict(known) | {cell: now[cell] * scale[baseline_of[cell]] for cell in missing}


def make(study: Study, seconds: Mapping[Cell, float] | None = None) -> Plan:
    """Solves for the sizes of all arms. seconds: of an update of each cell, for match='seconds' (default: `timings`).
    Raises UserError for an arm whose config is not valid, and for a design that is none (studies/checks.py)."""
    seconds = timings(study, {}) if seconds is None else seconds
    solved = {cell: matched(study, cell, seconds) for cell in cells(study)}
    check(study, solved)
    trials = list(planned(study))
    flops = sum(solved[trial.cell].training_flops for trial in trials)
    alpha = statistics.ALPHA / (len(study.arms) - 1)  # the first step of Holm's method
    deviation = study.deviation / len(study.sizes) ** 0.5  # of the mean over sizes, if what their seeds do is independent
    return Plan(
        solved,
        len(trials),
        len(trials) + study.extensions * sum(cell == tuned(study, cell) for cell in solved),
        flops,
        np.nan,
        statistics.detectable(deviation, study.seeds, alpha),
        statistics.equivalence_power(study.margin, deviation, study.seeds, alpha),
    )


def timed(plan: Plan) -> Plan:
    """The plan with the hours that it takes on this machine, if all arms are as fast for each FLOP as the first one."""
    first = next(iter(plan.matched.values()))
    timer = Timer(first.config)
    rate = first.training_flops / first.config.steps / min(timer() for _ in range(UPDATES))
    return plan._replace(hours=plan.training_flops / rate / 3600)


def lines(study: Study, plan: Plan) -> list[str]:
    """The plan as text."""
    found = [f"question   {study.question}", f"rule       {study.rule}"]
    extra = f", at most {plan.most_runs:,}" if plan.most_runs > plan.runs else ""
    hours = f", some {plan.hours:.1f} hours here" if plan.hours == plan.hours else ""
    found.append(f"runs       {plan.runs:,}{extra}: {plan.training_flops:.2e} FLOPs{hours}")
    together = f" over {len(study.sizes)} sizes together" if len(study.sizes) > 1 else ""
    found.append(
        f"power      {study.seeds} pairs find a difference of {plan.detectable:.4f}{together} with a chance of 80 % if "
        f"paired differences of one size have a deviation of {study.deviation:g}; up to {study.margin:g} counts as none, "
        f"and an arm without a difference is called equivalent with a chance of {plan.chance_of_equivalent:.0%}"
    )
    return found + table(study, plan.matched)


def table(study: Study, solved: Mapping[Cell, Matched]) -> list[str]:
    """Job number, parameters and cost of each cell."""
    titles = ("job", "size", "arm", "parameters", "updates", "FLOPs", f"{study.match} beside the baseline's", "solved for")
    rows, job_of = [titles], {cell: str(number) for number, job in enumerate(jobs(study)) for cell in job}
    for cell, each in solved.items():
        numbers = f"{each.parameters:,}", f"{each.config.steps:,}", f"{each.training_flops:.2e}", f"{each.mismatch:+.2%}"
        rows.append((job_of[cell], *cell, *numbers, each.solved))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
