"""The choice of a learning rate, as a part of the experiment: which rates run, which one is chosen, what the choice costs.

At a rung that tunes, every rate of the grid runs once. Then only the best rate and its two neighbours get further runs. If
another rate then has the best mean, its neighbours get runs, too; if the best rate lies at the edge, the next one is tried.
The chosen rate is the vertex of the parabola through the three means in log rate. With one run for each rate there is no
mean, and the best rate that was tried is chosen.

At another rung, the log rate lies on the flattest plane in (log parameters, log tokens) through the vertices of the rungs
that tune: one rung gives a constant, two give a power law along the line between them (of compute, in DeepSeek-AI 2024,
section 3.1), and more than two a plane. It goes at most one step of the grid beyond the rates that were tried. Along a
direction in which no rung tunes, the rate stays the same, and the intervals grow by the possible cost of a wrong rate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

# Deviation of the power of the best rate in parameters or tokens where no rung tells: published are -0.71 in parameters and
# 0.31 in tokens (Li et al. 2025, arXiv 2503.04715, eq. 1), and -0.125 in compute (DeepSeek-AI 2024).
POWERS = 0.5
# A neighbour is over a cliff if its loss is above the best by more than this share of it, and by more than this multiple of
# the other neighbour's rise. A parabola through it has its vertex where no loss is low: for 2.096, 2.094 and 3.263 (dyt_2 in
# docs/data/studies/norms_alpha) it is 0.15 below the best.
CLIFF, ONE_SIDED = 0.25, 5.0
Tried = Mapping[float, Sequence[float]]  # rate: losses of its runs; NaN for one that diverged


class Parabola(NamedTuple):
    """loss = lowest + curvature / 2 (log rate - vertex)^2."""

    vertex: float
    curvature: float


def means(tried: Tried) -> dict[float, float]:
    """{rate: mean loss} in ascending order; NaN if a run diverged."""
    return {rate: float(np.mean(tried[rate])) for rate in sorted(tried)}


def best_rate(losses: Mapping[float, float]) -> float | None:
    """The learning rate with the smallest loss. Of rates with equal losses, as where all solve a task, the one closest to
    the middle of the grid. None if every run diverged."""
    rates = sorted(losses)
    known = [rate for rate in rates if math.isfinite(losses[rate])]
    middle = (len(rates) - 1) / 2
    return min(known, key=lambda rate: (losses[rate], abs(rates.index(rate) - middle)), default=None)


def at_edge(losses: Mapping[float, float]) -> Literal["", "low", "high"]:
    """Whether the best learning rate is the smallest or the largest one that was tried: 'low' if every run diverged."""
    best = best_rate(losses)
    return "low" if best in (None, min(losses)) else "high" if best == max(losses) else ""


def next_runs(tried: Tried, grid: Sequence[float], runs: int, extensions: int) -> dict[float, int]:
    """The rates with runs that can start now, and how many runs each is to have. Empty if the choice can be made."""
    if missing := {rate: 1 for rate in grid if not tried.get(rate)}:
        return missing
    losses = means(tried)
    edge = at_edge(losses)
    if edge and len(losses) < len(grid) + extensions:
        ratio = grid[1] / grid[0]
        return {float(f"{min(losses) / ratio if edge == 'low' else max(losses) * ratio:.3g}"): 1}
    hopeful = [rate for rate in _neighbours(losses) if math.isfinite(losses[rate])]
    return {rate: runs for rate in hopeful if len(tried[rate]) < runs}


def _neighbours(losses: Mapping[float, float]) -> list[float]:
    """The best rate and those beside it, in ascending order."""
    best, rates = best_rate(losses), sorted(losses)
    at = rates.index(best) if best is not None else 0
    return rates[max(0, at - 1) : at + 2] if best is not None else []


def parabola(tried: Tried) -> Parabola | None:
    """Through the means of the best rate and its neighbours; None if one diverged, is over a cliff, or is not there."""
    losses = means(tried)
    rates = _neighbours(losses)
    if len(rates) < 3 or not all(math.isfinite(losses[rate]) for rate in rates) or at_edge(losses):
        return None
    x_3, y_3 = np.log(rates), np.array([losses[rate] for rate in rates])
    less, more = sorted(y_3[[0, 2]] - y_3[1])
    if more > max(CLIFF * y_3[1], ONE_SIDED * less):
        return None
    square, slope, _ = np.polyfit(x_3 - x_3[1], y_3 - y_3[1], 2)
    if square <= 0:  # three equal means, as of a task that all rates solve
        return None
    return Parabola(float(x_3[1] - slope / (2 * square)), float(2 * square))


def chosen(tried: Tried, runs: int) -> float | None:
    """The rate of a rung that tunes; None if every run diverged."""
    curve = parabola(tried) if runs > 1 else None
    return best_rate(means(tried)) if curve is None else float(f"{math.exp(curve.vertex):.3g}")


class Carry(NamedTuple):
    """The log rates of all rungs R are weights_RT times those of the tuned rungs T. unknown_RF: the coordinates of a rung
    along the directions (log parameters, log tokens) in which no rung tunes."""

    weights_RT: np.ndarray
    unknown_RF: np.ndarray
    tuned: tuple[int, ...]


def carry(scales_RF: np.ndarray, tuned: Sequence[int]) -> Carry:
    """scales_RF: log parameters and log tokens of the baseline at each rung. A tuned rung has its own rate."""
    tuned = list(tuned)
    centre_F = scales_RF[tuned].mean(0)
    from_RF, known_TF = scales_RF - centre_F, scales_RF[tuned] - centre_F
    slopes_FT = np.linalg.pinv(known_TF, rcond=1e-6)
    weights_RT = 1 / len(tuned) + from_RF @ (slopes_FT - slopes_FT.mean(1, keepdims=True))
    unknown_RF = from_RF - from_RF @ slopes_FT @ known_TF
    weights_RT[tuned], unknown_RF[tuned] = np.eye(len(tuned)), 0.0
    return Carry(weights_RT, unknown_RF, tuple(tuned))


def carried(rates_T: Sequence[float], weights_T: np.ndarray, tried: Sequence[float], ratio: float) -> float:
    """The rate of a rung, of those of the tuned rungs. tried: all rates that ran there; ratio: a step of the grid."""
    rate = math.exp(float(weights_T @ np.log(rates_T)))
    return float(f"{min(max(rate, min(tried) / ratio), max(tried) * ratio):.3g}")


def drawn_deviations(runs: Sequence[np.ndarray], draws: int, seed: int) -> np.ndarray:
    """[B]: draws of the standard deviation of a run, given the runs of each cell. All cells have the same, so an arm that
    varies more widens the intervals of all. Runs that diverged (NaN) are left out; 0 if none is left."""
    squares, freedom = 0.0, 0
    for values_N in runs:
        known = values_N[np.isfinite(values_N)]
        squares += float(known.var() * len(known)) if len(known) else 0.0
        freedom += max(len(known) - 1, 0)
    return np.sqrt(squares / np.random.default_rng(seed).chisquare(max(freedom, 1), draws))


def resampled_rises(tried_T: Sequence[Tried], deviation_B: np.ndarray, carry: Carry, runs: int, seed: int) -> np.ndarray:
    """[B, R]: the rise of an arm's loss above its lowest point, if the whole choice of its rate is made again with other
    noise. deviation_B: draws of the standard deviation of a run. The fitted parabolas are taken as the truth; a rung that
    does not tune has the mean of their curvatures. Along directions in which no rung tunes, the best rate moves with a power
    that is drawn (POWERS). 0 if no tuned rung has a parabola."""
    rng, fitted = np.random.default_rng(seed), [parabola(each) for each in tried_T]
    known, draws = [each.curvature for each in fitted if each is not None], len(deviation_B)
    if not known:
        return np.zeros((draws, len(carry.weights_RT)))
    off_BT = np.zeros((draws, len(tried_T)))
    for at, (each, curve) in enumerate(zip(tried_T, fitted, strict=True)):
        if curve is not None:
            off_BT[:, at] = _chosen_again(each, curve, deviation_B, runs, rng) - curve.vertex
    powers_BF = POWERS * rng.standard_normal((draws, carry.unknown_RF.shape[1]))
    off_BR = off_BT @ carry.weights_RT.T + powers_BF @ carry.unknown_RF.T
    curvature_R = np.full(len(carry.weights_RT), np.mean(known))
    curvature_R[list(carry.tuned)] = [np.mean(known) if each is None else each.curvature for each in fitted]
    return np.square(off_BR) * curvature_R / 2


def _chosen_again(tried: Tried, truth: Parabola, deviation_B: np.ndarray, runs: int, rng) -> np.ndarray:
    """[B]: log rates that the same grid would have chosen."""
    x_K = np.log(sorted(tried))
    noise_BK = deviation_B[:, None] / math.sqrt(runs) * rng.standard_normal((len(deviation_B), len(x_K)))
    loss_BK = truth.curvature / 2 * np.square(x_K - truth.vertex) + noise_BK
    if runs == 1:
        return x_K[loss_BK.argmin(1)]
    middle = np.clip(loss_BK.argmin(1), 1, len(x_K) - 2)
    rows = np.arange(len(deviation_B))
    left, best, right = (loss_BK[rows, middle + step] for step in (-1, 0, 1))
    step_B = (x_K[middle + 1] - x_K[middle - 1]) / 2
    bend_B = left - 2 * best + right
    shift_B = np.where(bend_B > 0, (left - right) / (2 * np.where(bend_B > 0, bend_B, 1)), np.sign(left - right))
    return x_K[middle] + step_B * np.clip(shift_B, -1, 1)
