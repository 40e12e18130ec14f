"""The plan of a study, before anything runs: runs, FLOPs, hours, and the smallest difference that it can find."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xfresearch.studies import statistics
from xfresearch.studies.cells import Cell, cells, planned
from xfresearch.studies.design import Study
from xfresearch.studies.matching import Matched, matched

UPDATES = 3  # that are timed


class Plan(NamedTuple):
    matched: dict[Cell, Matched]
    runs: int  # if no best learning rate lies at the edge of the grid
    most_runs: int
    training_flops: float  # of `runs`
    hours: float  # NaN if nothing was timed
    detectable: float  # the smallest difference that is found with a chance of 80 %


def make(study: Study) -> Plan:
    """Solves for the sizes of all arms. Raises UserError for an arm whose config is not valid."""
    solved = {cell: matched(study, *cell) for cell in cells(study)}
    trials = list(planned(study))
    flops = sum(solved[trial.cell].training_flops for trial in trials)
    alpha = statistics.ALPHA / (len(study.arms) - 1)  # the first step of Holm's method
    return Plan(
        solved,
        len(trials),
        len(trials) + study.extensions * len(solved),
        flops,
        np.nan,
        statistics.detectable(study.deviation, study.seeds, alpha),
    )


def timed(plan: Plan) -> Plan:
    """The plan with the hours that it takes on this machine, if all arms are as fast for each FLOP as the first one."""
    return plan._replace(hours=plan.training_flops * _seconds_per_flop(next(iter(plan.matched.values()))) / 3600)


def _seconds_per_flop(first: Matched) -> float:
    """Of an update, measured."""
    import jax

    from xfresearch.data.pipeline import Batches
    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.training import loop
    from xfresearch.training.hyper import hyper_of
    from xfresearch.training.program import shared_program

    config = first.config
    loop.setup_jax(config)
    program = shared_program(config, make_mesh(config))
    batch, state = Batches(config).batch(0), program.jit_init(hyper_of(config))
    seconds = []
    for _ in range(UPDATES):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(program.jit_update(state, batch))
        seconds.append(time.perf_counter() - began)
    return min(seconds) / (first.training_flops / config.steps)


def lines(study: Study, plan: Plan) -> list[str]:
    """The plan as text."""
    found = [f"question   {study.question}", f"rule       {study.rule}"]
    extra = f", at most {plan.most_runs:,}" if plan.most_runs > plan.runs else ""
    hours = f", some {plan.hours:.1f} hours here" if plan.hours == plan.hours else ""
    found.append(f"runs       {plan.runs:,}{extra}: {plan.training_flops:.2e} FLOPs{hours}")
    found.append(
        f"power      {study.seeds} pairs find a difference of {plan.detectable:.4f} with a chance of 80 % if paired "
        f"differences have a deviation of {study.deviation:g}; up to {study.margin:g} counts as none"
    )
    return found + table(study, plan.matched)


def table(study: Study, solved: Mapping[Cell, Matched]) -> list[str]:
    """Parameters and cost of each cell."""
    titles = ("size", "arm", "parameters", "updates", "FLOPs", f"{study.match} beside the baseline's", "solved for")
    rows = [titles]
    for cell, each in solved.items():
        numbers = f"{each.parameters:,}", f"{each.config.steps:,}", f"{each.training_flops:.2e}", f"{each.mismatch:+.2%}"
        rows.append((*cell, *numbers, each.solved))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
