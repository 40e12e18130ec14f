"""Which keys a query can select: for which k_i there is a q with q . k_i > q . k_j for all other keys k_j.

There is none exactly if k_i is in the convex hull of the other keys (Brody et al. 2023, sec. 2.2; Grivas et al. 2022). One
linear program decides, with a certificate either way:

    largest t with q . (k_i - k_j) >= t for all j, and |q| <= 1 in every dimension

If t > 0, q selects the key. If t = 0, the multipliers of the constraints are the weights of a convex combination of the
other keys that equals k_i. Most keys need no program: a few queries are tried for all keys at a time first.
"""

from typing import NamedTuple

import numpy as np

TRIES = 30  # steps of the search for a query
SMALL = 1e-9  # of t, relative to the size of the keys


class Selectable(NamedTuple):
    """For each of N distinct keys [N, d]: whether a query selects it, and the certificate."""

    keys_ND: np.ndarray
    selects_N: np.ndarray  # booleans
    queries_ND: np.ndarray  # a query that selects the key; NaN for a key that none selects
    weights_NN: dict[int, np.ndarray]  # {key that none selects: weights of the others, whose mean it is}
    programs: int  # linear programs that were solved


def selectable(keys_ND) -> Selectable:
    """Decides for every distinct row of `keys_ND`. In float64; N = 1,000 and d = 64 take seconds."""
    keys_ND = np.unique(np.asarray(keys_ND, np.float64), axis=0)
    centred_ND = keys_ND - keys_ND.mean(0)
    scale = np.abs(centred_ND).max() or 1.0
    centred_ND /= scale
    queries_ND = _search(centred_ND)
    weights = {}
    open_keys = np.flatnonzero(np.isnan(queries_ND[:, 0]))
    for i in map(int, open_keys):
        query_D, weights_N = _decide(centred_ND, i)
        if query_D is None:
            weights[i] = weights_N
        else:
            queries_ND[i] = query_D
    return Selectable(keys_ND, ~np.isnan(queries_ND[:, 0]), queries_ND, weights, len(open_keys))


def _search(keys_ND: np.ndarray) -> np.ndarray:
    """A query [N, d] for each key that a perceptron finds within TRIES steps, NaN for the others.

    The first query is the key itself. Each step adds the difference to the key that wins instead."""
    found_ND = np.full_like(keys_ND, np.nan)
    left = np.arange(len(keys_ND))
    queries_ND = keys_ND.copy()
    for _ in range(TRIES):
        scores_LN = queries_ND @ keys_ND.T
        own_L = scores_LN[np.arange(len(left)), left]
        scores_LN[np.arange(len(left)), left] = -np.inf
        best_L = scores_LN.argmax(1)
        sizes_L = np.abs(queries_ND).max(1)
        wins_L = own_L - scores_LN.max(1) > SMALL * np.maximum(sizes_L, 1e-300)
        found_ND[left[wins_L]] = queries_ND[wins_L]
        step_LD = keys_ND[left] - keys_ND[best_L]
        norms_L1 = np.linalg.norm(step_LD, axis=1, keepdims=True)
        queries_ND = (queries_ND + step_LD / np.maximum(norms_L1, 1e-300))[~wins_L]
        left = left[~wins_L]
        if not len(left):
            break
    return found_ND


def _decide(keys_ND: np.ndarray, i: int) -> tuple:
    """(query, None) or (None, weights of the other keys) of key i, by the linear program above."""
    from scipy.optimize import linprog

    others = np.delete(np.arange(len(keys_ND)), i)
    differences = keys_ND[others] - keys_ND[i]
    size = keys_ND.shape[1]
    limits = np.concatenate([differences, np.ones((len(others), 1))], 1)  # q . (k_j - k_i) + t <= 0
    goal = np.zeros(size + 1)
    goal[-1] = -1.0
    bounds = [(-1.0, 1.0)] * size + [(0.0, None)]
    done = linprog(goal, A_ub=limits, b_ub=np.zeros(len(others)), bounds=bounds, method="highs")
    if done.status != 0:
        raise ArithmeticError(f"HiGHS ended with status {done.status}: {done.message}")
    if done.x[-1] > SMALL:
        return done.x[:-1], None
    weights_N = np.zeros(len(keys_ND))
    weights_N[others] = -done.ineqlin.marginals
    return None, weights_N / weights_N.sum()
