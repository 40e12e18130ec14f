"""The runs of a study. A cell is an arm at a size; its runs have different learning rates and seeds.

First every rate of the grid runs with one seed that no comparison uses. If the best rate is the smallest or the largest
one, a further one is tried, as often as the study allows. Then the seeds run at the best rate. With `tune_at`, the rates run
at that size alone, and the other sizes have the rate that is best there. All of this follows from the results so far: an
interrupted study goes on, and its runs may be on different machines, by several processes or by numbered jobs of a run each.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from xfresearch.studies import rates
from xfresearch.studies.design import TUNING_SEED, Study


class Cell(NamedTuple):
    size: str
    arm: str


class Trial(NamedTuple):
    """One run of a cell."""

    cell: Cell
    rate: float
    seed: int

    @property
    def tunes(self) -> bool:
        """Whether the run helps to choose a learning rate, and is not compared."""
        return self.seed == TUNING_SEED

    @property
    def folder(self) -> str:
        """Of the run, in the directory of the study."""
        return f"{self.cell.size}/{self.cell.arm}/rate-{self.rate:g}-seed-{self.seed}"


Results = Mapping[Trial, float]  # the metric of finished runs, where less is better; NaN or infinite if a run diverged


def cells(study: Study) -> list[Cell]:
    """All cells in their order: by size, the baseline first."""
    arms = [study.baseline, *(arm for arm in study.arms if arm != study.baseline)]
    return [Cell(size, arm) for size in study.sizes for arm in arms]


class Job(NamedTuple):
    """A run as it is numbered before anything is known: with a rate of the grid, or at the best rate of its cell."""

    cell: Cell
    rate: float | None  # None: the best one
    seed: int


def jobs(study: Study) -> list[Job]:
    """The numbered jobs of a study: first all that try a rate, then the seeds of each cell, which need the best rate. Rates
    beyond the grid have none: the job that needs them tries them."""
    trying = [cell for cell in cells(study) if cell == tuned(study, cell)]
    tried_first = [Job(cell, rate, TUNING_SEED) for cell in trying for rate in study.rates]
    return tried_first + [Job(cell, None, seed) for cell in cells(study) for seed in range(study.seeds)]


def tuned(study: Study, cell: Cell) -> Cell:
    """The cell in which the learning rates of a cell are tried."""
    return Cell(study.tune_at or cell.size, cell.arm)


def tried(study: Study, results: Results, cell: Cell) -> dict[float, float]:
    """The result of each learning rate that was tried for a cell, by the seed that chooses."""
    at = tuned(study, cell)
    return {trial.rate: loss for trial, loss in results.items() if trial.cell == at and trial.tunes}


def next_rate(study: Study, losses: Mapping[float, float]) -> float | None:
    """The learning rate to try next: one of the grid, or one beyond its edge; None if the best is known."""
    for rate in study.rates:
        if rate not in losses:
            return rate
    edge = rates.at_edge(losses)
    if not edge or len(losses) >= len(study.rates) + study.extensions:
        return None
    ratio = study.rates[1] / study.rates[0]
    return float(f"{min(losses) / ratio if edge == 'low' else max(losses) * ratio:.3g}")


def tuning(study: Study, results: Results, cell: Cell) -> list[Trial]:
    """The runs that choose the rate of a cell, as far as they are known: the grid, and those beyond its edge."""
    losses = tried(study, results, cell)
    last = next_rate(study, losses)
    beyond = {*losses, *([] if last is None else [last])} - {*study.rates}
    return [Trial(tuned(study, cell), rate, TUNING_SEED) for rate in (*study.rates, *sorted(beyond))]


def compared(study: Study, results: Results, cell: Cell) -> list[Trial]:
    """The paired runs of a cell; [] while its rate is not known, or if every learning rate diverged."""
    losses = tried(study, results, cell)
    best = None if next_rate(study, losses) is not None else rates.best_rate(losses)
    return [] if best is None else seeded(study, cell, best)


def startable(study: Study, results: Results, cell: Cell) -> list[Trial]:
    """The runs that a cell still needs and that may start now, in any order; [] if it is complete."""
    missing = [trial for trial in tuning(study, results, cell) if trial not in results]
    return missing or [trial for trial in compared(study, results, cell) if trial not in results]


def startable_for(study: Study, results: Results, job: Job) -> list[Trial]:
    """The runs that a job still needs and that may start now: its own, and before it those that choose its rate."""
    if job.rate is not None:
        own = Trial(job.cell, job.rate, job.seed)
        return [own] if own not in results else []
    every = startable(study, results, job.cell)
    return [trial for trial in every if trial.tunes or trial.seed == job.seed]


def next_trial(study: Study, results: Results, cell: Cell) -> Trial | None:
    """The next run for a cell; None if it is complete, or every learning rate diverged."""
    return next(iter(startable(study, results, cell)), None)


def seeded(study: Study, cell: Cell, rate: float) -> list[Trial]:
    """The paired runs of a cell."""
    return [Trial(cell, rate, seed) for seed in range(study.seeds)]


def planned(study: Study) -> Iterator[Trial]:
    """All runs of a study whose best rates lie inside the grid; for a plan, at the middle rate of the grid."""
    for cell in cells(study):
        if cell == tuned(study, cell):
            yield from (Trial(cell, rate, TUNING_SEED) for rate in study.rates)
        yield from seeded(study, cell, study.rates[len(study.rates) // 2])


def extensions(study: Study, trials: Iterable[Trial]) -> list[Trial]:
    """The runs at learning rates beyond the grid, which are not planned."""
    return [trial for trial in trials if trial.tunes and trial.rate not in study.rates]
