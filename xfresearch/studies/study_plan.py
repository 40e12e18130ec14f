"""The plan of a study, before anything runs: runs, FLOPs, hours, and the smallest difference that it can find."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from xfresearch.run_config.config import Config
from xfresearch.runtime.progress import stage
from xfresearch.studies import interim
from xfresearch.studies.cells import Cell, Ladder, Trial, jobs
from xfresearch.studies.checks import check
from xfresearch.studies.design import Study, reference, rungs
from xfresearch.studies.matching import Matched, all_matched
from xfresearch.studies.matching import ladder as ladder_of
from xfresearch.studies.simultaneous import chance_of_equivalent, detectable, typical_critical
from xfresearch.training.timing import relative_seconds, same_seconds, seconds_per_update


class Plan(NamedTuple):
    matched: dict[Cell, Matched]
    ladder: Ladder
    runs: int  # if no best learning rate lies at the edge of the grid
    training_flops: float  # of `runs`
    detectable: float  # at a rung, the smallest difference that is found with a chance of 80 %
    chance_of_equivalent: float  # of an arm without a difference, at a rung


def timings(study: Study, configs: Mapping[Cell, Config], known: Mapping[Cell, float]) -> dict[Cell, float]:
    """The seconds of an update of each cell on this machine: those that are known, and for the others, such as an arm that
    was added, as many times the baseline's as is measured now. Cells that differ in their number of updates alone are timed
    once. known: no arm without the baseline at its size."""
    seconds = dict(known)
    missing = [cell for cell in configs if cell not in known]
    if not missing:
        return seconds
    baseline = {cell: Cell(cell.rung, study.baseline) for cell in configs}
    digest = {cell: same_seconds(config) for cell, config in configs.items()}
    kind = {cell: (digest[cell], digest[baseline[cell]]) for cell in configs}
    ratios = {kind[cell]: value / known[baseline[cell]] for cell, value in known.items()}
    of_baselines = {kind[cell]: value for cell, value in known.items() if cell == baseline[cell]}
    with stage("timing updates", len({kind[cell] for cell in missing}), "configs") as progress:
        for cell in missing:
            base = baseline[cell]
            if kind[base] not in of_baselines:
                of_baselines[kind[base]], ratios[kind[base]] = seconds_per_update(configs[base]), 1.0
                progress.update(1)
            if kind[cell] not in ratios:
                ratios[kind[cell]] = relative_seconds(configs[cell], configs[base])
                progress.update(1)
            seconds.setdefault(base, of_baselines[kind[base]])
            seconds[cell] = seconds[base] * ratios[kind[cell]]
    return seconds


def make(study: Study, seconds: Mapping[Cell, float] | None = None) -> Plan:
    """Solves for the sizes of all arms. seconds: of an update of each cell, if they are known; match='seconds' needs them.
    Raises UserError for an arm whose config is not valid, and for a design that is none (studies/checks.py)."""
    solved = all_matched(study, seconds or {})
    check(study, solved)
    ladder = ladder_of(study, solved)
    trials = ladder.expected({})
    flops = sum(solved[trial.cell].training_flops for trial in trials)
    error = study.deviation / study.seeds**0.5
    critical, inner = typical_critical(len(study.arms) - 1, len(rungs(study)), study.seeds)
    smallest, equivalent = detectable(error, critical), chance_of_equivalent(study.margin, error, inner)
    return Plan(solved, ladder, len(trials), flops, smallest, equivalent)


def time_line(plan: Plan, seconds: Mapping[Cell, float], left: Iterable[Trial]) -> str:
    """How long the runs that are left train, on the machine that timed an update of each cell."""
    hours = sum(plan.matched[trial.cell].config.steps * seconds[trial.cell] for trial in left) / 3600
    time = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    return f"time       some {time} of training for what is left, where the updates were timed"


def lines(study: Study, plan: Plan, ended: Collection[Trial]) -> list[str]:
    """The plan as text. ended: the runs that have a result, in the directory or in those of other studies."""
    shown = [f"question   {study.question}", f"rule       {study.rule}"]
    most = len(jobs(study))
    shown.append(f"runs       {plan.runs:,}: {plan.training_flops:.2e} FLOPs; {len(ended):,} have a result")
    shown.append(f"jobs       {most:,} at most, 0 to {most - 1:,} (--job I): each makes one run, and ends if none is left")
    sizes, budgets = len(study.sizes), max(1, len(study.budgets))
    if (sizes < 3 or budgets < 2) and not study.tiny:
        shown.append(f"ladder     {sizes} x {budgets}: to say how far an answer holds takes 3 sizes x 2 budgets or more")
    shown.append(
        f"power      {study.seeds} pairs find a difference of {plan.detectable:.4f} at a rung with a chance of 80 % if "
        f"paired differences have a deviation of {study.deviation:g}; up to {study.margin:g} counts as none, and an arm "
        f"without a difference is called equivalent there with a chance of {plan.chance_of_equivalent:.0%}"
    )
    return [*shown, *_looks(study), *table(study, plan.matched)]


def _looks(study: Study) -> list[str]:
    """What looks save, of a study that has some."""
    if not study.looks:
        return []
    most = len(study.arms) * len(rungs(study)) * study.seeds
    none, twice = (interim.expected_runs(study, difference) for difference in (0.0, 2 * study.margin))
    return [
        f"looks      after {' and '.join(map(str, study.looks))} of {study.seeds} pairs: an arm with a verdict at every "
        f"rung gets no more. Of {most:,} runs that decide {none:,.0f} are expected if no arm differs, {twice:,.0f} if all "
        f"differ by {2 * study.margin:g} ({interim.SIMULATED} simulated studies)"
    ]


def table(study: Study, solved: Mapping[Cell, Matched]) -> list[str]:
    """Parameters and cost of each cell."""
    relative = f"{study.match}, relative to {reference(study)}"
    rows = [("rung", "arm", "parameters", "updates", "FLOPs", relative, "solved for")]
    for cell, each in solved.items():
        numbers = f"{each.parameters:,}", f"{each.config.steps:,}", f"{each.training_flops:.2e}", f"{each.mismatch:+.2%}"
        rows.append((*cell, *numbers, each.solved))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
