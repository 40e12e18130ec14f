"""Looks at a study before all seeds have run, by a rule that was fixed before (group-sequential tests)."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special

GRID = 400  # points of the recursion on each side of zero


def levels(looks: Sequence[int], alpha: float) -> list[float]:
    """The level of each look, such that a study which ends at the first look that decides is wrong with a chance of alpha.

    looks: pairs of runs at each look, ascending. By Lan and DeMets (1983) with O'Brien and Fleming's spending function,
    2 - 2 Phi(z_{alpha/4} / sqrt(t)) on each side for the share t of all pairs: early looks spend little. The levels are
    those of two-sided normal tests, by the recursion of Armitage, McPherson and Rowe (1969); t tests at the same levels are
    Pocock's (1977) approximation."""
    shares = [look / looks[-1] for look in looks]
    spent = [4 * special.ndtr(-special.ndtri(1 - alpha / 4) / math.sqrt(share)) for share in shares]
    alphas: list[float] = []
    density, points = np.zeros(0), np.zeros(0)  # of the score, given that no earlier look has decided
    for at, share in enumerate(shares):
        before = shares[at - 1] if at else 0.0
        spread = math.sqrt(share - before)

        now = spent[at] - (spent[at - 1] if at else 0.0)

        def surplus(bound: float, now=now, spread=spread, share=share, density=density, points=points) -> float:
            """The chance that no earlier look decides and this one does, |score| > bound sqrt(share), beyond the planned."""
            end = bound * math.sqrt(share)
            if not len(points):
                return 2 * float(special.ndtr(-end / spread)) - now
            outside = special.ndtr((-end - points) / spread) + special.ndtr((points - end) / spread)
            return float((density * outside).sum()) - now

        bound = float(optimize.brentq(surplus, 0.0, 12.0))
        alphas.append(2 * float(special.ndtr(-bound)))
        ends = np.linspace(-bound * math.sqrt(share), bound * math.sqrt(share), 2 * GRID + 1)
        step = ends[1] - ends[0]
        weights = np.full(len(ends), step)
        weights[[0, -1]] = step / 2
        if not len(points):
            density, points = weights * _normal(ends / spread) / spread, ends
        else:
            moved = _normal((ends[:, None] - points) / spread) / spread
            density, points = weights * (moved @ density), ends
    return alphas


def _normal(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)
