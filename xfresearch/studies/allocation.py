"""The allocation of runs to arms: which run is the next one. A cell is an arm at a rung of the ladder (a size, with its
number of tokens); its runs, the trials, have different learning rates and seeds.

At the rungs of `tune_at`, or at all, rates.py says which rates run, with seeds that no comparison uses. Then the seeds run
at every rung, with the rate that was chosen there, or that was carried to it. All of this follows from the results so far:
an interrupted study goes on, and any number of processes and machines may take runs that are ready.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xfresearch.studies import rates
from xfresearch.studies.design import TUNING_SEED, Study, rungs


class Cell(NamedTuple):
    rung: str
    arm: str


class Trial(NamedTuple):
    """One run of a cell."""

    cell: Cell
    rate: float
    seed: int

    @property
    def tunes(self) -> bool:
        """Whether the run helps to choose a learning rate, and is not compared."""
        return self.seed >= TUNING_SEED

    @property
    def folder(self) -> str:
        """Of the run, in the directory of the study."""
        return f"{self.cell.rung}/{self.cell.arm}/rate-{self.rate:g}-seed-{self.seed}"


Results = Mapping[Trial, float]  # the metric of finished runs, where less is better; NaN or infinite if a run diverged
Pairs = Mapping[str, int] | None  # {arm: the pairs of runs that it needs} (verdicts.py); None: all pairs


def arms(study: Study) -> list[str]:
    """The baseline first."""
    return [study.baseline, *(arm for arm in study.arms if arm != study.baseline)]


def compared(study: Study) -> list[str]:
    """The arms beside the baseline."""
    return arms(study)[1:]


def cells(study: Study) -> list[Cell]:
    """All cells in their order: by rung, the baseline first."""
    return [Cell(rung.name, arm) for rung in rungs(study) for arm in arms(study)]


def tuned(study: Study) -> list[Cell]:
    """The cells whose learning rates are tried."""
    return [cell for cell in cells(study) if cell.rung in study.tune_at or not study.tune_at]


def jobs(study: Study) -> range:
    """The numbers of the jobs of a study, each of which makes one run: as many as it can have runs."""
    tuning = (len(study.rates) + study.extensions) * study.rate_runs
    return range(len(tuned(study)) * tuning + len(cells(study)) * study.seeds)


def tried(results: Results, cell: Cell) -> dict[float, list[float]]:
    """The results of each learning rate that was tried for a cell, in the order of their seeds."""
    by_rate: dict[float, list[float]] = {}
    for trial in sorted(trial for trial in results if trial.cell == cell and trial.tunes):
        by_rate.setdefault(trial.rate, []).append(results[trial])
    return by_rate


class RateChoice(NamedTuple):
    """The state of the choice of a cell's learning rate: the runs that can start now, those that have ended, and the rate
    (None: not known yet, or all runs diverged)."""

    pending: list[Trial]
    tried: dict[float, list[float]]
    rate: float | None


class Ladder(NamedTuple):
    """A study, and how rates go from rung to rung (rates.carry; one row for each rung)."""

    study: Study
    carry: rates.Carry

    def tuning(self, results: Results, cell: Cell) -> list[Trial]:
        """The runs that can start now, to choose the rate of a rung that tunes. Of several processes, one may end its run
        before another one ends a run that began earlier."""
        study = self.study
        wanted = rates.next_runs(tried(results, cell), study.rates, study.rate_runs, study.extensions)
        every = (Trial(cell, rate, TUNING_SEED + run) for rate, runs in wanted.items() for run in range(runs))
        return [trial for trial in every if trial not in results]

    def sources(self, cell: Cell) -> dict[Cell, float]:
        """The cells that tune the rate of a cell, with their weights: itself, if its rung tunes."""
        names = [rung.name for rung in rungs(self.study)]
        weights_T = self.carry.weights_RT[names.index(cell.rung)]
        known = zip(self.carry.tuned, weights_T, strict=True)
        return {Cell(names[at], cell.arm): float(weight) for at, weight in known if abs(weight) > 1e-9}

    def rate(self, results: Results, cell: Cell) -> float | None:
        """The learning rate that decides in a cell; None as long as it is not known, or if all rates diverged."""
        return self._rate({source: self._choice(results, source) for source in self.sources(cell)}, cell)

    def _choice(self, results: Results, cell: Cell) -> RateChoice:
        """What is known of the rate of a rung that tunes."""
        by_rate, pending = tried(results, cell), self.tuning(results, cell)
        return RateChoice(pending, by_rate, None if pending else rates.chosen(by_rate, self.study.rate_runs))

    def _rate(self, choices: Mapping[Cell, RateChoice], cell: Cell) -> float | None:
        sources = self.sources(cell)
        each_T = [choices[source] for source in sources]
        known_T = [each.rate for each in each_T if each.rate is not None]
        if len(known_T) < len(each_T):
            return None
        if cell in sources:
            return known_T[0]
        every, weights_T = [rate for each in each_T for rate in each.tried], np.array(list(sources.values()))
        return rates.carried(known_T, weights_T, every, self.study.rates[1] / self.study.rates[0])

    def _left(self, results: Results, guess: float | None, pairs: Pairs) -> tuple[list[list[Trial]], list[Trial]]:
        """For each rung that tunes, the runs that can start now to choose its rate; and the paired runs that are left.
        guess: a rate for cells whose rate is not known yet; None leaves their runs out."""
        choices = {cell: self._choice(results, cell) for cell in tuned(self.study)}
        decide = []
        for cell in cells(self.study):
            waits = any(choices[source].pending for source in self.sources(cell))
            rate = guess if waits else self._rate(choices, cell)
            number = self.study.seeds if pairs is None else pairs[cell.arm]
            decide += [] if rate is None else [each for each in seeded(cell, rate, number) if each not in results]
        return [choice.pending for choice in choices.values()], decide

    def ready(self, results: Results, pairs: Pairs = None) -> list[Trial]:
        """The runs that can start now, in their order: those that choose rates before those that decide."""
        tuning, decide = self._left(results, None, pairs)
        return [*(trial for pending in tuning for trial in pending), *decide]

    def expected(self, results: Results, pairs: Pairs = None) -> list[Trial]:
        """The runs that are left if the choices of rates need no further runs: no best rate lies at the edge of the grid,
        and none moves. A rate that is not known yet is taken from the grid."""
        study, trials = self.study, []
        tuning, decide = self._left(results, self.study.rates[len(self.study.rates) // 2], pairs)
        for pending in filter(None, tuning):
            runs = len(study.rates) + min(3, len(study.rates)) * (study.rate_runs - 1)
            missing = runs - sum(map(len, tried(results, pending[0].cell).values()))
            trials += [pending[0]] * max(missing, len(pending))
        return trials + decide


def seeded(cell: Cell, rate: float, number: int) -> list[Trial]:
    """The paired runs of a cell."""
    return [Trial(cell, rate, seed) for seed in range(number)]
