"""The choice of learning rates: which runs follow from which, the vertex, and what goes to other rungs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.studies import simulated
from tests.studies.simulated import D_R, EXTENSIONS, GRID, N_R, PLACES_RF, RUNS, world
from tests.studies.test_allocation import ladder
from tests.studies.test_design import STUDY
from xfresearch.studies import rates


def followed(losses: dict[float, float], runs: int = RUNS, extensions: int = EXTENSIONS) -> dict[float, list[float]]:
    """All runs of a choice, whose rates have these losses, and 9 elsewhere."""
    tried: dict[float, list[float]] = {}
    while steps := rates.next_runs(tried, GRID, runs, extensions):
        rate = next(iter(steps))
        assert steps[rate] > len(tried.get(rate, []))
        tried.setdefault(rate, []).append(losses.get(rate, 9.0))
    return tried


def noise(draws: int, deviation: float = simulated.NOISE) -> np.ndarray:
    """[draws]: a deviation that is known."""
    return np.full(draws, deviation)


def test_hopeless_rates_have_one_run_and_the_best_with_its_neighbours_three():
    tried = followed({0.004: 3.0, 0.008: 2.0, 0.016: 1.5, 0.032: 2.5})
    assert {rate: len(runs) for rate, runs in tried.items()} == {0.004: 1, 0.008: 3, 0.016: 3, 0.032: 3}


def test_a_rate_that_diverges_is_not_run_again_and_bounds_the_grid():
    tried = followed({0.004: 2.5, 0.008: 2.0, 0.016: math.nan})
    assert {rate: len(runs) for rate, runs in tried.items()} == {0.004: 3, 0.008: 3, 0.016: 1}
    assert rates.chosen(tried, RUNS) == 0.008  # no parabola


def test_further_runs_may_show_another_best_rate():
    losses = {0.004: [2.5] * 3, 0.008: [1.9, 2.4, 2.4], 0.016: [2.0, 2.0, 2.0], 0.032: [2.2] * 3}
    tried: dict[float, list[float]] = {}
    while steps := rates.next_runs(tried, GRID, RUNS, EXTENSIONS):
        had = tried.setdefault(rate := next(iter(steps)), [])
        had.append(losses[rate][len(had)])
    assert len(tried[0.032]) == 3 and rates.best_rate(rates.means(tried)) == 0.016


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_several_processes_end_in_any_order(seed):
    """A run that has ended must not be called ready again: a study would wait for it for ever."""
    study = replace(STUDY, rates=GRID, rate_runs=RUNS, tune_at=("a",))
    rng, results = np.random.default_rng(seed), {}
    while ready := ladder(study).ready(results):
        assert not results.keys() & set(ready)
        trial = ready[rng.integers(len(ready))]
        results[trial] = math.log(trial.rate / 0.01) ** 2 + 0.5 * rng.standard_normal()
    assert len({trial for trial in results if not trial.tunes}) == 2 * 2 * study.seeds


def test_extensions_end():
    tried = followed({rate: rate**-1 for rate in (0.004, 0.008, 0.016, 0.032, 0.064, 0.128)})
    assert max(tried) == 0.128 and len(tried) == len(GRID) + EXTENSIONS
    assert rates.chosen(tried, RUNS) == 0.128


def test_the_chosen_rate_is_the_vertex_of_a_parabola():
    losses = {rate: 2 + 0.3 * math.log(rate / 0.0095) ** 2 for rate in (*GRID, 0.002, 0.032)}
    tried = followed(losses)
    assert rates.chosen(tried, RUNS) == 0.0095
    assert rates.parabola(tried).curvature == pytest.approx(0.6)
    assert rates.chosen(tried, 1) == 0.008  # with one run a rate, the best that was tried


def test_no_parabola_goes_over_a_cliff():
    """The vertex would lie between 0.032 and 0.064, and the loss above it, which the report takes off, would be 0.16."""
    tried = {0.016: [2.138] * 3, 0.032: [2.0959] * 3, 0.064: [2.0939] * 3, 0.128: [3.2633] * 3}
    assert rates.parabola(tried) is None and rates.chosen(tried, RUNS) == 0.064
    assert not rates.resampled_rises([tried], noise(20, 0.01), rates.carry(PLACES_RF, (0,)), RUNS, 0).any()
    assert rates.parabola({**tried, 0.128: [2.12] * 3}) is not None  # as one-sided, but low
    assert rates.parabola({0.01: [3.0], 0.02: [2.0], 0.04: [2.9]}) is not None  # as high, but on both sides


def test_a_rate_goes_to_other_rungs_by_the_flattest_plane():
    log_rates = math.log(0.01) - 0.3 * np.log(N_R * D_R / (N_R * D_R)[0])  # a power of compute
    on_the_line = rates.carry(np.log(np.stack([N_R, 20 * N_R], 1)), (0, 2))
    known = math.log(0.01) - 0.6 * np.log(N_R / N_R[0])
    assert on_the_line.weights_RT @ known[[0, 2]] == pytest.approx(known)
    assert np.abs(on_the_line.unknown_RF).max() < 1e-9
    three = rates.carry(PLACES_RF, (0, 1, 2))
    assert three.weights_RT @ log_rates[[0, 1, 2]] == pytest.approx(log_rates)
    one = rates.carry(PLACES_RF, (0,))
    assert one.weights_RT == pytest.approx(1.0) and one.unknown_RF[0] == pytest.approx(0.0)
    assert one.unknown_RF == pytest.approx(PLACES_RF - PLACES_RF[0])


def test_a_carried_rate_stays_within_a_step_of_those_that_were_tried():
    assert rates.carried((0.01, 0.001), np.array([-3.0, 4.0]), GRID, 2.0) == 0.002
    assert rates.carried((0.01, 0.02), np.array([0.5, 0.5]), GRID, 2.0) == 0.0141


def test_the_rise_of_resampled_choices_is_that_of_studies():
    """The same choice made again from the truth costs as much as the resampling of one choice says."""
    truth, rng, rung = world(), np.random.default_rng(0), 3
    vertex, costs, said = truth.vertex_AR[1, rung], [], []
    carry = rates.carry(PLACES_RF, (rung,))
    for seed in range(150):
        tried = simulated.tuned(truth, 1, rung, RUNS, rng)
        off = math.log(rates.chosen(tried, RUNS)) - vertex
        costs.append(simulated.CURVATURE / 2 * off**2)
        said.append(rates.resampled_rises([tried], noise(50), carry, RUNS, seed)[:, rung].mean())
    assert np.mean(said) == pytest.approx(np.mean(costs), rel=0.5)
    one = [rates.resampled_rises([tried], noise(50), carry, 1, 0)[:, rung].mean()]
    assert np.mean(one) > 2 * np.mean(said)  # a choice of one run a rate costs more
    far = rates.resampled_rises([tried], noise(500), carry, RUNS, 0).mean(0)
    assert far[0] > 3 * far[rung]  # where no rung tunes, the move is unknown


def test_without_a_parabola_nothing_is_known_of_the_rise():
    carry = rates.carry(PLACES_RF, (0,))
    assert not rates.resampled_rises([{0.01: [2.0], 0.02: [math.nan]}], noise(3), carry, 1, 0).any()
