"""Studies that are drawn from a known truth, and decided by the rule of studies or by the one that they had before."""

import math
from itertools import chain
from typing import NamedTuple

import numpy as np
from scipy import stats

from xfresearch.comparing.pairing import holm
from xfresearch.studies import rates
from xfresearch.studies.simultaneous import Intervals, intervals

SIZES, BUDGETS = (0.5e6, 1e6, 2e6), (10.0, 20.0)
N_R = np.repeat(SIZES, len(BUDGETS))
D_R = N_R * np.tile(BUDGETS, len(SIZES))
PLACES_RF = np.log(np.stack([N_R, D_R], 1))
TUNED = (0, 3)  # the first size with few tokens, the second with many
THREE = (0, 1, 2)  # the first size with few and many tokens, the second with few
GRID, EXTENSIONS, RUNS = (0.004, 0.008, 0.016), 3, 3
MARGIN, NOISE, CURVATURE = 0.02, 0.01, 0.1
ARMS, PAIRS = 3, 5


class World(NamedTuple):
    """The truth: of each arm, the baseline first, at each rung R, with the best rate. Correlation is that of pairs."""

    effect_AR: np.ndarray
    vertex_AR: np.ndarray  # log of the best rate
    noise_AR: np.ndarray
    correlation: float = 0.3

    def run(self, arm: int, rung: int, rate: float, noise: float) -> float:
        off = math.log(rate) - self.vertex_AR[arm, rung]
        return 2 + self.effect_AR[arm, rung] + CURVATURE / 2 * off**2 + self.noise_AR[arm, rung] * noise


def world(effect=0.0, moves=(0.0,) * (ARMS + 1), noise=(1.0,) * (ARMS + 1)) -> World:
    """moves: the power of each arm's best rate in the parameters; effect: of the arms, a number or one for each rung."""
    shape = np.ones((ARMS + 1, len(N_R)))
    effect_AR = shape * effect
    effect_AR[0] = 0
    vertex_AR = math.log(0.008) + 0.1 * shape + np.outer(moves, np.log(N_R / N_R[0]))
    return World(effect_AR, vertex_AR, NOISE * np.array(noise)[:, None] * shape)


def tuned(world: World, arm: int, rung: int, runs: int, rng) -> dict[float, list[float]]:
    """Every run of a choice of the rate, in the order in which a study makes them."""
    tried: dict[float, list[float]] = {}
    while steps := rates.next_runs(tried, GRID, runs, EXTENSIONS):
        rate = next(iter(steps))
        tried.setdefault(rate, []).append(world.run(arm, rung, rate, rng.standard_normal()))
    return tried


def part(world: World, arms: int, rungs: int) -> World:
    """The first arms and rungs."""
    arrays = [each[: arms + 1, :rungs] for each in (world.effect_AR, world.vertex_AR, world.noise_AR)]
    return World(*arrays, world.correlation)


def paired_values(world: World, rates_AR, rng, pairs: int = PAIRS) -> np.ndarray:
    """[arms + 1, R, N]: the runs that decide."""
    A, R = world.effect_AR.shape
    shared = math.sqrt(world.correlation) * rng.standard_normal((1, R, pairs))
    noise_ARN = shared + math.sqrt(1 - world.correlation) * rng.standard_normal((A, R, pairs))
    every = [[world.run(arm, rung, rates_AR[arm][rung], noise_ARN[arm, rung]) for rung in range(R)] for arm in range(A)]
    return np.array(every)


def study(world: World, rng, at=TUNED, draws: int = 200, pairs: int = PAIRS, runs: int = RUNS) -> Intervals:
    """The intervals of a study: rates tuned at some rungs, carried to the others, and resampled."""
    A, R = world.effect_AR.shape
    carry = rates.carry(PLACES_RF[:R], at)
    tried_AT = [[tuned(world, arm, rung, runs, rng) for rung in at] for arm in range(A)]
    rates_AR = [_rates(tried_T, carry, runs) for tried_T in tried_AT]
    values_ARN = paired_values(world, rates_AR, rng, pairs)
    deviation_B = rates.drawn_deviations([*values_ARN[:, list(at)].reshape(-1, pairs)], draws, seed=100)
    rises = [rates.resampled_rises(tried_T, deviation_B, carry, runs, arm) for arm, tried_T in enumerate(tried_AT)]
    rises_BAR = np.stack([each - rises[0] for each in rises[1:]], 1)
    return intervals(values_ARN[1:] - values_ARN[0], None, rises_BAR, draws=draws)


def _rates(tried_T, carry: rates.Carry, runs: int) -> list[float]:
    best_T = [rates.chosen(tried, runs) for tried in tried_T]
    every = sorted(set(chain(*tried_T)))
    return [rates.carried(best_T, weights_T, every, GRID[1] / GRID[0]) for weights_T in carry.weights_RT]


def verdicts(estimates: Intervals) -> np.ndarray:
    """[A, R] words."""
    within = estimates.p_beyond(MARGIN) < 0.05
    differs = np.where(estimates.mean < 0, "better", "worse")
    return np.where(within, "equivalent", np.where(estimates.p < 0.05, differs, "undecided"))


def former_verdicts(world: World, rng) -> np.ndarray:
    """[A, R] words by the rule that studies had: one run for each rate at the smallest size, the best rate that was tried,
    and at each rung t tests of pairs, corrected by Holm's method over the arms of the rung."""
    rate_A = [rates.best_rate(rates.means(tuned(world, arm, 0, 1, rng))) for arm in range(ARMS + 1)]
    values_ARN = paired_values(world, [[rate] * len(N_R) for rate in rate_A], rng)
    differences_ARN = values_ARN[1:] - values_ARN[0]
    test = stats.ttest_1samp(differences_ARN, 0.0, axis=-1)
    beyond = [stats.ttest_1samp(sign * differences_ARN, MARGIN, axis=-1, alternative="less").pvalue for sign in (1, -1)]
    differs_AR, within_AR = (_holm(p_AR) for p_AR in (test.pvalue, np.maximum(*beyond)))
    differs = np.where(differences_ARN.mean(-1) < 0, "better", "worse")
    return np.where(within_AR < 0.05, "equivalent", np.where(differs_AR < 0.05, differs, "undecided"))


def _holm(p_AR: np.ndarray) -> np.ndarray:
    return np.stack([holm(list(p_A)) for p_A in p_AR.T], 1)
