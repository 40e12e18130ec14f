"""Rows times the matrix of the group (expert) that they belong to: y_t = x_t w_{e(t)}, rows sorted by group.

`ragged` is jax.lax.ragged_dot: the ideal number of FLOPs on TPU, E times that on CPU.
`blocked` walks over each group's rows in blocks. A group's last block runs on into the next group's rows: what it
writes there is overwritten by that group, which comes later; what it would add to a weight's gradient is masked. So
nothing is gathered, and the FLOPs are those of `computed_rows`, T + E BLOCK / 2 on average, less than T + E BLOCK always:
forward, and again for each of the two gradients, which walk over the same blocks.
"""

import jax
import jax.numpy as jnp

from xfresearch.errors import UserError, nearest
from xfresearch.kernels.attention import Choice

IMPLEMENTATIONS = ("auto", "ragged", "blocked")
BLOCK = 128


def choose_grouped_matmul(implementation="auto", backend=None) -> Choice:
    """Which implementation is used, and why. `backend` is JAX's default one unless given."""
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS) + nearest(implementation, IMPLEMENTATIONS)
        raise UserError(f"grouped_matmul implementation={implementation!r} is not allowed: it must be one of {allowed}")
    if implementation != "auto":
        return Choice(implementation, "asked for")
    backend = backend or jax.default_backend()
    if backend == "cpu":
        return Choice("blocked", "ragged_dot multiplies every row by every group's matrix on CPU")
    return Choice("ragged", f"ragged_dot is a grouped product on {backend}")


def grouped_matmul(x_TD, w_EDF, sizes_E, *, implementation="auto", platform=None, whole=True):
    """y_TF in x's dtype. Rows of x are sorted by group, sizes_E of them for each.

    The sizes sum to T, or, not `whole`, to fewer: the rows beyond are zeros, and their y gets no gradient.
    """
    if choose_grouped_matmul(implementation, platform).name == "ragged":
        y_TF = jax.lax.ragged_dot(x_TD, w_EDF, sizes_E.astype(jnp.int32))
    else:
        y_TF = _blocked(x_TD, w_EDF, sizes_E)
    return y_TF if whole else jnp.where(jnp.arange(len(y_TF))[:, None] < sizes_E.sum(), y_TF, 0)


def computed_rows(sizes_E) -> int:
    """Rows that one product of `blocked` multiplies, for groups of `sizes_E` rows: those of each group, in whole blocks."""
    block = min(BLOCK, int(sum(sizes_E)))
    return sum(int(_blocks(size, block)) * block for size in sizes_E)


@jax.custom_vjp
def _blocked(x_TD, w_EDF, sizes_E):
    return _rows_times_matrix(x_TD, w_EDF, sizes_E, "TD,DF->TF", w_EDF.shape[2])


def _forward(x_TD, w_EDF, sizes_E):
    return _blocked(x_TD, w_EDF, sizes_E), (x_TD, w_EDF, sizes_E)


def _backward(residuals, dy_TF):
    x_TD, w_EDF, sizes_E = residuals
    dx_TD = _rows_times_matrix(dy_TF, w_EDF, sizes_E, "TF,DF->TD", w_EDF.shape[1])
    return dx_TD, _weight_gradient(x_TD, dy_TF, sizes_E).astype(w_EDF.dtype), None


_blocked.defvjp(_forward, _backward)


def _rows_times_matrix(x_TI, w_E, sizes_E, product: str, outputs: int):
    T, block = x_TI.shape[0], min(BLOCK, x_TI.shape[0])
    x_TI = jnp.pad(x_TI, ((0, block), (0, 0)))

    def group(y_TO, inputs):
        w, start, size = inputs

        def step(i, y_TO):
            row = start + i * block
            y = jnp.einsum(product, _slice(x_TI, row, block), w, preferred_element_type=_wide(x_TI))
            return jax.lax.dynamic_update_slice(y_TO, y.astype(y_TO.dtype), (row, 0))

        return jax.lax.fori_loop(0, _blocks(size, block), step, y_TO), None

    y_TO = jnp.zeros((T + block, outputs), x_TI.dtype)
    return jax.lax.scan(group, y_TO, (w_E, _starts(sizes_E), sizes_E))[0][:T]


def _weight_gradient(x_TD, dy_TF, sizes_E):
    block = min(BLOCK, x_TD.shape[0])
    x_TD, dy_TF = (jnp.pad(a, ((0, block), (0, 0))) for a in (x_TD, dy_TF))

    def group(_, inputs):
        start, size = inputs

        def step(i, dw_DF):
            row, own = start + i * block, jnp.arange(block) < size - i * block
            x = jnp.where(own[:, None], _slice(x_TD, row, block), 0)
            return dw_DF + jnp.einsum("TD,TF->DF", x, _slice(dy_TF, row, block), preferred_element_type=_wide(x))

        zeros_DF = jnp.zeros((x_TD.shape[1], dy_TF.shape[1]), _wide(x_TD))
        return None, jax.lax.fori_loop(0, _blocks(size, block), step, zeros_DF)

    return jax.lax.scan(group, None, (_starts(sizes_E), sizes_E))[1]


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _slice(x, row, block: int):
    return jax.lax.dynamic_slice_in_dim(x, row, block)


def _starts(sizes_E):
    return jnp.cumsum(sizes_E) - sizes_E


def _blocks(size, block: int):
    return (size + block - 1) // block
