"""Grouped matrix product in plain JAX that multiplies rows only by the matrix of their own group.

A loop processes each group's rows in blocks. The last block of a group extends into the next group's rows. The next
group comes later and overwrites the outputs written there; a mask removes the extra rows from a weight's gradient. So
no rows are gathered. The FLOPs are those of `computed_rows` rows, on average T + E block / 2 and always less than T + E
block. The forward pass and each of the two gradients have these FLOPs, because all three use the same blocks.
"""

from functools import partial

import jax
import jax.numpy as jnp


def computed_rows(sizes_E, block: int) -> int:
    """Number of rows that one product of `blocked` multiplies: the rows of each group, rounded up to whole blocks."""
    block = min(block, int(sum(sizes_E)))
    return sum(int(_blocks(size, block)) * block for size in sizes_E)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def blocked(x_TD, w_EDF, sizes_E, block: int):
    """y_TF in x's dtype. Rows of x are sorted by group, sizes_E rows in each. `block` rows are multiplied at once."""
    return _rows_times_matrix(x_TD, w_EDF, sizes_E, block, "TD,DF->TF", w_EDF.shape[2])


def _forward(x_TD, w_EDF, sizes_E, block: int):
    return blocked(x_TD, w_EDF, sizes_E, block), (x_TD, w_EDF, sizes_E)


def _backward(block: int, residuals, dy_TF):
    x_TD, w_EDF, sizes_E = residuals
    dx_TD = _rows_times_matrix(dy_TF, w_EDF, sizes_E, block, "TF,DF->TD", w_EDF.shape[1])
    return dx_TD, _weight_gradient(x_TD, dy_TF, sizes_E, block).astype(w_EDF.dtype), None


blocked.defvjp(_forward, _backward)


def _rows_times_matrix(x_TI, w_E, sizes_E, block: int, product: str, outputs: int):
    T = x_TI.shape[0]
    block = min(block, T)
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


def _weight_gradient(x_TD, dy_TF, sizes_E, block: int):
    block = min(block, x_TD.shape[0])
    x_TD, dy_TF = (jnp.pad(a, ((0, block), (0, 0))) for a in (x_TD, dy_TF))

    def group(_, inputs):
        start, size = inputs

        def step(i, dw_DF):
            row = start + i * block
            own = jnp.arange(block) < size - i * block  # rows of this group
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
