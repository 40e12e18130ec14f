"""The runs of a study: which follow from which results."""

import math
from dataclasses import replace

import numpy as np

from tests.studies.test_design import CELL, STUDY
from xfresearch.studies import allocation, design
from xfresearch.studies.allocation import Cell, Ladder, Trial
from xfresearch.studies.design import Study
from xfresearch.studies.rates import carry


def ladder(study: Study = STUDY) -> Ladder:
    """Whose second rung has twice the parameters and tokens."""
    names = [rung.name for rung in design.rungs(study)]
    tuned = [names.index(cell.rung) for cell in allocation.tuned(study) if cell.arm == "base"]
    return Ladder(study, carry(np.log([[2.0**at, 2.0**at] for at in range(len(names))]), tuned))


def follow(losses: dict[float, float], study: Study = STUDY, cell: Cell = CELL) -> list[Trial]:
    """All runs of an arm at a rung, and those that choose its rate, whose rates have these losses; all seeds end."""
    results, trials = {}, []
    while ready := [each for each in ladder(study).ready(results) if each.cell in (cell, *ladder(study).sources(cell))]:
        trial = ready[0]
        results[trial] = losses[trial.rate] if trial.tunes else 1.0
        trials += [trial] if trial.tunes or trial.cell == cell else []
    return trials


def test_seeds_run_at_the_best_rate():
    result = follow({1e-3: 3.0, 1e-2: 2.0, 1e-1: 2.5})
    assert [trial.rate for trial in result] == [1e-3, 1e-2, 1e-1, 1e-2, 1e-2, 1e-2]
    assert [trial.seed for trial in result[3:]] == [0, 1, 2]


def test_a_best_rate_at_the_edge_extends_the_grid_as_often_as_allowed():
    rates = [trial.rate for trial in follow({1e-3: 1.0, 1e-2: 2.0, 1e-4: 0.9, 1e-5: 0.8})]
    assert rates == [1e-3, 1e-2, 1e-4, 1e-5, 1e-5, 1e-5, 1e-5]
    assert len(follow({1e-3: 1.0, 1e-2: 2.0}, replace(STUDY, extensions=0))) == 5


def test_rates_may_be_chosen_at_one_rung():
    study, large = replace(STUDY, tune_at=("a",)), Cell("b", "wide")
    result = follow({1e-3: 3.0, 1e-2: 2.0, 1e-1: 2.5}, study, large)
    assert [trial.cell for trial in result] == [CELL] * 3 + [large] * 3
    assert [trial.rate for trial in result[3:]] == [1e-2] * 3
    assert len(ladder(study).expected({})) == 2 * (2 + 3) + 2 * 3
    assert len(allocation.jobs(study)) == 2 * (2 + 2) + 4 * 3  # with two rates beyond the grid


def test_rates_of_two_rungs_go_on_to_a_third():
    sizes = {"a": (), "b": ("model.width=64",), "c": ("model.width=96",)}
    study = replace(STUDY, sizes=sizes, tune_at=("a", "b"), rates=(1e-3, 2e-3, 4e-3), rate_runs=2, seeds=2)
    results = {}
    while ready := ladder(study).ready(results):
        assert len({trial.cell.rung for trial in ready if trial.tunes}) != 1 or not all(t.tunes for t in ready)
        for trial in ready:
            best = {"a": math.log(2e-3), "b": math.log(2e-3 * 2**-0.5)}.get(trial.cell.rung, 0.0)
            results[trial] = 2.0 + 0.1 * (math.log(trial.rate) - best) ** 2
    decided = {trial.cell.rung: trial.rate for trial in results if not trial.tunes}
    assert decided == {"a": 2e-3, "b": 1.41e-3, "c": 9.94e-4}  # by a power of -1/2 in the parameters
    assert not ladder(study).expected(results)


def test_a_rate_that_diverges_bounds_the_grid_and_smaller_ones_are_tried_if_all_do():
    assert [trial.rate for trial in follow({1e-3: 1.0, 1e-2: math.nan, 1e-4: 2.0})][3:] == [1e-3] * 3
    assert [trial.rate for trial in follow(dict.fromkeys((1e-3, 1e-2, 1e-4, 1e-5), math.nan))] == [1e-3, 1e-2, 1e-4, 1e-5]


def test_a_plan_counts_all_runs():
    result = ladder().expected({})
    assert len(result) == 2 * 2 * (2 + 3)
    assert allocation.cells(STUDY) == [Cell("a", "base"), Cell("a", "wide"), Cell("b", "base"), Cell("b", "wide")]
