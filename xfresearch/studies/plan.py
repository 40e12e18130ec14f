"""The plan of a study, before anything runs: runs, FLOPs, hours, and the smallest difference that it can find."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from xfresearch.run.config import Config
from xfresearch.runtime.progress import stage
from xfresearch.studies import statistics
from xfresearch.studies.cells import Cell, Trial, cells, extensions, jobs, planned, tuned
from xfresearch.studies.checks import check
from xfresearch.studies.design import Study
from xfresearch.studies.matching import LEAST_SPREAD, Matched, has_trend, matched, trend_of
from xfresearch.training.timing import relative_seconds, seconds_per_update


class Plan(NamedTuple):
    matched: dict[Cell, Matched]
    runs: int  # if no best learning rate lies at the edge of the grid
    most_runs: int
    training_flops: float  # of `runs`
    detectable: float  # over all sizes together, the smallest difference that is found with a chance of 80 %
    chance_of_equivalent: float  # of an arm without a difference


def timings(study: Study, configs: Mapping[Cell, Config], known: Mapping[Cell, float]) -> dict[Cell, float]:
    """The seconds of an update of each cell on this machine: those that are known, and for the others, such as an arm that
    was added, as many times the baseline's as is measured now. known: no arm without the baseline at its size."""
    found = dict(known)
    missing = [cell for cell in configs if cell not in known]
    if not missing:
        return found
    with stage("timing updates", len(missing), "cells") as progress:
        for cell in missing:
            baseline = Cell(cell.size, study.baseline)
            if baseline not in found:
                found[baseline] = seconds_per_update(configs[baseline])
            if cell != baseline:
                found[cell] = found[baseline] * relative_seconds(configs[cell], configs[baseline])
            progress.update(1)
    return found


def make(study: Study, seconds: Mapping[Cell, float] | None = None) -> Plan:
    """Solves for the sizes of all arms. seconds: of an update of each cell, if they are known; match='seconds' needs them.
    Raises UserError for an arm whose config is not valid, and for a design that is none (studies/checks.py)."""
    solved = {cell: matched(study, cell, seconds or {}) for cell in cells(study)}
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
        statistics.detectable(deviation, study.seeds, alpha),
        statistics.equivalence_power(study.margin, deviation, study.seeds, alpha),
    )


def time_line(
    study: Study, plan: Plan, seconds: Mapping[Cell, float], ended: Collection[Trial], left: Collection[Cell]
) -> str:
    """How long the planned runs that have not ended train, on the machine that timed an update of each cell. left: the cells
    that need runs; one that diverged at every rate has ended with fewer than were planned."""
    runs = Counter(trial.cell for trial in planned(study))
    runs.subtract(trial.cell for trial in set(ended).difference(extensions(study, ended)))
    hours = sum(plan.matched[cell].config.steps * seconds[cell] * max(0, runs[cell]) for cell in left) / 3600
    time = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    return f"time       some {time} of training for what is left, where the updates were timed"


def lines(study: Study, plan: Plan, ended: Collection[Trial]) -> list[str]:
    """The plan as text. ended: the runs that have a result, in the directory or in those of other studies."""
    found = [f"question   {study.question}", f"rule       {study.rule}"]
    extra = f", at most {plan.most_runs:,}" if plan.most_runs > plan.runs else ""
    found.append(f"runs       {plan.runs:,}{extra}: {plan.training_flops:.2e} FLOPs; {len(ended):,} have a result")
    together = f" over {len(study.sizes)} sizes together" if len(study.sizes) > 1 else ""
    found.append(
        f"power      {study.seeds} pairs find a difference of {plan.detectable:.4f}{together} with a chance of 80 % if "
        f"paired differences of one size have a deviation of {study.deviation:g}; up to {study.margin:g} counts as none, "
        f"and an arm without a difference is called equivalent with a chance of {plan.chance_of_equivalent:.0%}"
    )
    baselines = [plan.matched[Cell(size, study.baseline)] for size in study.sizes]
    if len(baselines) > 1 and not has_trend(trend_of(study, each) for each in baselines):
        found.append(f"trend      none: the sizes differ by less than {LEAST_SPREAD} times in {study.trend}")
    return found + table(study, plan.matched)


def table(study: Study, solved: Mapping[Cell, Matched]) -> list[str]:
    """Numbers of the jobs, parameters and cost of each cell."""
    relative = f"{study.match}, relative to the baseline"
    titles = ("jobs", "size", "arm", "parameters", "updates", "FLOPs", relative, "solved for")
    rows, numbered = [titles], list(enumerate(jobs(study)))
    for cell, each in solved.items():
        of_cell = [number for number, job in numbered if job.cell == cell]
        numbers = (f"{each.parameters:,}", f"{each.config.steps:,}", f"{each.training_flops:.2e}", f"{each.mismatch:+.2%}")
        rows.append((_ranges(of_cell), *cell, *numbers, each.solved))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ranges(numbers: list[int]) -> str:
    """'0-2,9-13' for ascending numbers, as Slurm's --array takes them."""
    ends = [i for i in numbers if i + 1 not in numbers]
    starts = [i for i in numbers if i - 1 not in numbers]
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in zip(starts, ends, strict=True))
