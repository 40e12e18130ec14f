"""Inverses of matrices, with their condition numbers for the certificate."""

import numpy as np

from xfresearch.surgery.refused import refuse_unless

WORST = 1e4  # largest condition number of a matrix that is inverted: float64 has 16 digits, and a certificate needs 10


def inverse(matrix: np.ndarray, figures: dict[str, float], name: str) -> np.ndarray:
    """The inverse of a square matrix. Its condition number goes into `figures`. Raises Refused above WORST."""
    _check(matrix, figures, name)
    return np.linalg.inv(matrix)


def pseudo_inverse(matrix: np.ndarray, figures: dict[str, float], name: str) -> np.ndarray:
    """The matrix [K, D] whose product with `matrix` [D, K] is the identity, (W^T W)^-1 W^T, as `inverse`."""
    _check(matrix, figures, name)
    return np.linalg.pinv(matrix)


def _check(matrix: np.ndarray, figures: dict[str, float], name: str) -> None:
    refuse_unless(matrix.shape[0] >= matrix.shape[1], f"{name} is {matrix.shape}: its columns are dependent")
    number = float(np.linalg.cond(matrix))
    refuse_unless(
        number <= WORST, f"{name} has condition number {number:.1e}, above {WORST:.0e}: it has no exact inverse"
    )
    figures[f"condition number of {name}"] = number
