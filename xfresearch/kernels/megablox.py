"""JAX's Pallas kernels for grouped products on TPU (Gale et al. 2022), with tiles chosen for each of the three products.

A product of T rows reads x F / outer times and a group's matrix rows / rows-of-a-tile times, so that tiles as large as the
chip's fast memory allows save the slow one: at Mixtral's sizes a third of the bytes of 512 x 1024 x 1024 for all three. A
tile of rows is computed once for each group in it.
"""

from functools import partial

import jax
import jax.numpy as jnp

ROWS = 128  # of a tile, at least
# Chips whose compiler gives a kernel 32 MiB of fast memory; the others have 16 (libtpu 0.0.42 refuses larger tiles there).
ROOMY = ("TPU v6", "TPU7x")
# (rows, inner, outer) of a tile in bfloat16, as large as compile on all chips and on those: of rows times matrices, and of
# the gradient of matrices, whose rows are what is summed over.
ROWS_TILE = {False: (1024, 512, 1024), True: (1024, 512, 2048)}
MATRIX_TILE = {False: (512, 1024, 1024), True: (512, 1024, 2048)}


def megablox(x_TD, w_EDF, sizes_E, kind: str = "", interpret: bool = False):
    """y_TF on chips of a `kind` (JAX's device_kind). Rows that belong to no group are whatever lay in memory."""
    T, E = x_TD.shape[0], w_EDF.shape[0]
    # With a quarter of a group's rows in a tile, a quarter more than there are is computed at most.
    most = max(1 << max(T // (4 * E), 1).bit_length() - 1, ROWS)
    roomy = kind.startswith(ROOMY)
    x_TD = jnp.pad(x_TD, ((0, -T % min(most, ROWS_TILE[roomy][0])), (0, 0)))
    return _product(x_TD, w_EDF, sizes_E.astype(jnp.int32), most, roomy, interpret)[:T]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x_TD, w_EDF, sizes_E, most: int, roomy: bool, interpret: bool):
    tile = _tile(ROWS_TILE[roomy], most, w_EDF.shape[1:], x_TD.dtype)
    return _kernels().gmm(x_TD, w_EDF, sizes_E, x_TD.dtype, tile, interpret=interpret)


def _forward(x_TD, w_EDF, sizes_E, *settings):
    return _product(x_TD, w_EDF, sizes_E, *settings), (x_TD, w_EDF, sizes_E)


def _backward(most, roomy, interpret, residuals, dy_TF):
    x_TD, w_EDF, sizes_E = residuals
    D, F = w_EDF.shape[1:]
    tile = _tile(ROWS_TILE[roomy], most, (F, D), dy_TF.dtype)
    dx_TD = _kernels().gmm(dy_TF, w_EDF, sizes_E, x_TD.dtype, tile, transpose_rhs=True, interpret=interpret)
    tile = _tile(MATRIX_TILE[roomy], most, (D, F), dy_TF.dtype)
    dw_EDF = _kernels().tgmm(x_TD.T, dy_TF, sizes_E, w_EDF.dtype, tile, interpret=interpret)
    return dx_TD, dw_EDF, None


_product.defvjp(_forward, _backward)


def _tile(tile: tuple, most: int, sizes: tuple, dtype) -> tuple:
    """`tile`, no larger than the arrays, half as wide where numbers are twice as large."""
    wide = jnp.dtype(dtype).itemsize // 2
    return (min(tile[0], most), *(min(size, limit // wide) for size, limit in zip(sizes, tile[1:], strict=True)))


def _kernels():
    import importlib  # the package has a function of the module's name

    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
