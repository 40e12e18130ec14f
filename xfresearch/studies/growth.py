"""The change of a difference along the ladder, its worth in tokens, and the law of the losses L(N, D). Letters: R rungs,
with N parameters and D tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from xfresearch.studies.simultaneous import Intervals

AXES = ("sizes", "budgets")  # along sizes at equal tokens for each parameter, and along budgets at equal sizes
LEAST_SPREAD = 1.3  # times the smallest rung that the largest one must be, along an axis, for a change along it
EXPONENTS = np.arange(0.1, 1.0, 0.0125)  # of the law, on a grid
Shape = Literal["grows", "shrinks", "rises", "falls", "stays", "unknown"]


def change_contrasts(axes_RF: np.ndarray) -> np.ndarray:
    """[F, R]: weights of the differences at the rungs R whose sum is the change along each of the axes F, from the smallest
    to the largest rung, at equal values of the other axes (least squares). axes_RF: the log of the quantities in which rungs
    differ. An axis along which rungs do not differ, or that follows from the others, has zeros."""
    centred_RF = axes_RF - axes_RF.mean(0)
    spread_F = np.ptp(axes_RF, axis=0)
    used = [axis for axis in range(axes_RF.shape[1]) if spread_F[axis] >= math.log(LEAST_SPREAD)]
    while used and np.linalg.matrix_rank(centred_RF[:, used], tol=1e-6) < len(used):
        used.pop()
    contrasts_FR = np.zeros(axes_RF.T.shape)
    if used:
        contrasts_FR[used] = np.linalg.pinv(centred_RF[:, used]) * spread_F[used, None]
    return contrasts_FR


def shape(mean: float, change: float, low: float, high: float, inner: tuple[float, float], margin: float) -> Shape:
    """Of a difference whose mean over the ladder is `mean`, and that changes by `change` (low to high) along it. inner: the
    one-sided bounds of the change. 'stays' if they are within the margin, which is the largest that counts as none. A
    difference that changes its sign, which makes a gain a cost, neither grows nor shrinks."""
    if -margin < inner[0] and inner[1] < margin:
        return "stays"
    if low <= 0 <= high:
        return "unknown"
    first, last = mean - change / 2, mean + change / 2
    less, more = sorted((abs(first), abs(last)))
    if first * last < 0 and less > more / 5:  # nearer to 0, it has vanished
        return "rises" if change > 0 else "falls"
    return "grows" if abs(last) > abs(first) else "shrinks"


def over_ladder(verdicts_R: Sequence[str]) -> str:
    """The verdict that all rungs have; 'mixed' if decided ones contradict each other; else 'undecided'."""
    verdicts = set(verdicts_R)
    if len(verdicts) == 1:
        return verdicts.pop()
    return "mixed" if len(verdicts - {"undecided"}) > 1 else "undecided"


def tokens_worth(losses: Mapping[float, float], difference: float) -> float | None:
    """The share of tokens more that lower a loss by `difference`, at the slope of the loss by log tokens between the fewest
    and the most. losses: {tokens: loss} of the baseline at one size. None for one number, or no fall."""
    first, last = min(losses), max(losses)
    if first == last or losses[first] <= losses[last]:
        return None
    slope = (losses[first] - losses[last]) / math.log(last / first)
    return math.expm1(difference / slope)


class Law(NamedTuple):
    """L(N, D) = E + A N^-alpha + B D^-beta (Hoffmann et al. 2022, eq. 10), of S sets of losses. Arrays [S]."""

    E: np.ndarray
    A: np.ndarray
    B: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def at(self, N: float, D: float) -> np.ndarray:
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta


def has_law(N_R: np.ndarray, D_R: np.ndarray) -> bool:
    """Whether rungs are enough for the five numbers of the law, and do not all have one ratio of tokens to parameters."""
    ratios = set(np.round(np.log(D_R / N_R), 2))
    return len(set(N_R)) >= 3 and len(set(D_R)) >= 3 and len(ratios) >= 2 and len(N_R) >= 6


def fit_law(N_R: np.ndarray, D_R: np.ndarray, losses_SR: np.ndarray, error_R: np.ndarray) -> Law:
    """The law with the least squares, weighted by the errors, and A, B of at least 0. With given exponents it is linear, so
    all pairs of them on a grid are solved exactly (variable projection): no start, and no early stop. Where no pair has
    positive A and B, both are 0."""
    scale_N, scale_D = N_R.min(), D_R.min()
    best_S = np.full(len(losses_SR), math.inf)
    best_S5 = np.zeros((len(losses_SR), 5))
    weighted_RS = (losses_SR / error_R).T
    for alpha in EXPONENTS:
        terms_XR3 = np.ones((len(EXPONENTS), len(N_R), 3))
        terms_XR3[..., 1] = (N_R / scale_N) ** -alpha
        terms_XR3[..., 2] = (D_R / scale_D) ** -EXPONENTS[:, None]
        terms_XR3 /= error_R[:, None]
        solved_X3S = np.linalg.pinv(terms_XR3) @ weighted_RS
        square_XS = np.square(weighted_RS - terms_XR3 @ solved_X3S).sum(1)
        square_XS[(solved_X3S[:, 1:] < 0).any(1)] = math.inf
        at_S = square_XS.argmin(0)
        each_S = np.arange(len(at_S))
        better_S = square_XS[at_S, each_S] < best_S
        best_S = np.minimum(best_S, square_XS[at_S, each_S])
        beta_S, (E_S, A_S, B_S) = EXPONENTS[at_S], solved_X3S[at_S, :, each_S].T
        each_S5 = np.stack([E_S, A_S * scale_N**alpha, B_S * scale_D**beta_S, np.full_like(E_S, alpha), beta_S], 1)
        best_S5 = np.where(better_S[:, None], each_S5, best_S5)
    none_S = np.isinf(best_S)
    best_S5[none_S, 0], best_S5[none_S, 3:] = losses_SR[none_S].mean(1), 1.0
    return Law(*best_S5.T)


def changes(estimates: Intervals, arm: int, mean: float, margin: float) -> dict[str, dict]:
    """{axis: change, its interval, its p and its shape} of an arm, of the intervals of `change_contrasts`."""
    lines = {}
    for at, axis in enumerate(AXES):
        if estimates.error[arm, at] > 0:
            change, low, high = (float(each[arm, at]) for each in (estimates.mean, estimates.low, estimates.high))
            inner = float(estimates.inner_low[arm, at]), float(estimates.inner_high[arm, at])
            word = shape(mean, change, low, high, inner, margin)
            lines[axis] = {"change": change, "low": low, "high": high, "p": float(estimates.p[arm, at]), "shape": word}
    return lines
