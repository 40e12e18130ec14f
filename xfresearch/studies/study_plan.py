"""The plan of a study, before anything runs: runs, FLOPs, hours, and the smallest difference that it can find."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.loading.language_model import LanguageModel
from xfresearch.models import transformer
from xfresearch.run_config.config import Config
from xfresearch.studies import probes
from xfresearch.studies.allocation import Cell, Ladder, Trial, compared, jobs
from xfresearch.studies.design import Study, reference, rungs
from xfresearch.studies.matching import Matched, all_matched, check
from xfresearch.studies.matching import ladder as ladder_of
from xfresearch.studies.measurement import tokenizer_of
from xfresearch.studies.simultaneous import chance_of_equivalent, detectable, shared_variances, typical_critical
from xfresearch.studies.verdicts import looks

SIMULATED = 500  # studies with looks


class Plan(NamedTuple):
    matched: dict[Cell, Matched]
    ladder: Ladder
    runs: int  # if no best learning rate lies at the edge of the grid
    training_flops: float  # of `runs`
    detectable: float  # at a rung, the smallest difference that is found with a chance of 80 %
    chance_of_equivalent: float  # of an arm without a difference, at a rung


def make(study: Study, seconds: Mapping[Cell, float] | None = None) -> Plan:
    """Solves for the sizes of all arms. seconds: of an update of each cell, if they are known; match='seconds' needs them.
    Raises UserError for an arm whose config is not valid, and for a design that is none (matching.check)."""
    solved = all_matched(study, seconds or {})
    check(study, solved)
    ladder = ladder_of(study, solved)
    trials = ladder.expected({})
    flops = sum(solved[trial.cell].training_flops for trial in trials)
    error = study.deviation / study.seeds**0.5
    critical, inner = typical_critical(len(study.arms) - 1, len(rungs(study)), study.seeds)
    smallest, equivalent = detectable(error, critical), chance_of_equivalent(study.margin, error, inner)
    return Plan(solved, ladder, len(trials), flops, smallest, equivalent)


def check_figures(study: Study, configs: Mapping[Cell, Config]) -> None:
    """Raises UserError if a probe names a figure of an analysis that no arm has, before anything is trained."""
    def models() -> Iterator[LanguageModel]:
        first = rungs(study)[0].name
        for config in (each for cell, each in configs.items() if cell.rung == first):
            params = transformer.init(config.model, jax.random.key(0))
            yield LanguageModel(config.model, params, tokenizer_of(config), config, 0)

    probes.check_figures(study.probes, models())


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
    none, twice = (expected_runs(study, difference) for difference in (0.0, 2 * study.margin))
    return [
        f"looks      after {' and '.join(map(str, study.looks))} of {study.seeds} pairs: an arm with a verdict at every "
        f"rung gets no more. Of {most:,} runs that decide {none:,.0f} are expected if no arm differs, {twice:,.0f} if all "
        f"differ by {2 * study.margin:g} ({SIMULATED} simulated studies)"
    ]


def expected_runs(study: Study, difference: float) -> float:
    """The mean number of runs that decide if all arms differ by `difference`, in simulated studies with the deviation of the
    plan."""
    rng, every = np.random.default_rng(0), looks(study)
    A, R = len(compared(study)), len(rungs(study))
    differences_SARN = difference + study.deviation * rng.standard_normal((SIMULATED, A, R, study.seeds))
    open_SA, pairs_SA = np.ones((SIMULATED, A), bool), np.full((SIMULATED, A), every[0].pairs)
    for look, following in pairwise(every):
        seen_SARN = differences_SARN[..., : look.pairs]
        shared_SAR = shared_variances(seen_SARN.var(-1, ddof=1), look.pairs - 1)
        error_SAR, size_SAR = np.sqrt(shared_SAR / look.pairs), np.abs(seen_SARN.mean(-1))
        critical, inner = typical_critical(A, R, look.pairs, look.level, look.draws)
        settled_SAR = (size_SAR > critical * error_SAR) | (size_SAR + inner * error_SAR < study.margin)
        open_SA = open_SA & ~settled_SAR.all(-1)
        pairs_SA = np.where(open_SA, following.pairs, pairs_SA)
    return R * float((pairs_SA.sum(1) + pairs_SA.max(1)).mean())


def table(study: Study, solved: Mapping[Cell, Matched]) -> list[str]:
    """Parameters and cost of each cell."""
    relative = f"{study.match}, relative to {reference(study)}"
    rows = [("rung", "arm", "parameters", "updates", "FLOPs", relative, "solved for")]
    for cell, each in solved.items():
        numbers = f"{each.parameters:,}", f"{each.config.steps:,}", f"{each.training_flops:.2e}", f"{each.mismatch:+.2%}"
        rows.append((*cell, *numbers, each.solved))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
