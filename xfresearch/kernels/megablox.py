"""JAX's Pallas kernels for grouped matrix products on TPU (Gale et al. 2022), with tiles for each of three products.

A product of T rows reads x F / outer times, and a group's matrix rows / rows-of-a-tile times. So the tiles are as large
as the chip's VMEM allows, which saves HBM traffic: at Mixtral's sizes a third of the bytes of 512 x 1024 x 1024 for all
three products. A tile of rows is computed once for each group in it.
"""

from functools import partial

import jax
import jax.numpy as jnp

ROWS = 128  # the smallest number of rows in a tile
# Chips whose compiler gives a kernel 32 MiB of VMEM; others have 16 MiB (libtpu 0.0.42 refuses larger tiles there).
LARGE_VMEM = ("TPU v6", "TPU7x")
# (rows, inner, outer) of a tile in bfloat16: the largest that compile on all chips, and on those with a large VMEM.
# ROWS_TILE is for rows times matrices. MATRIX_TILE is for the gradient of the matrices, which sums over rows.
ROWS_TILE = {False: (1024, 512, 1024), True: (1024, 512, 2048)}
MATRIX_TILE = {False: (512, 1024, 1024), True: (512, 1024, 2048)}


def megablox(x_TD, w_EDF, sizes_E, kind: str = "", interpret: bool = False):
    """y_TF. kind: JAX's device_kind of the chips. Rows of y that belong to no group are uninitialised memory."""
    T = x_TD.shape[0]
    E = w_EDF.shape[0]
    # A tile has a quarter of the rows of an average group, so that at most a quarter more rows than T are computed.
    max_rows = max(1 << max(T // (4 * E), 1).bit_length() - 1, ROWS)
    large_vmem = kind.startswith(LARGE_VMEM)
    x_TD = jnp.pad(x_TD, ((0, -T % min(max_rows, ROWS_TILE[large_vmem][0])), (0, 0)))
    return _product(x_TD, w_EDF, sizes_E.astype(jnp.int32), max_rows, large_vmem, interpret)[:T]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x_TD, w_EDF, sizes_E, max_rows: int, large_vmem: bool, interpret: bool):
    tile = _tile(ROWS_TILE[large_vmem], max_rows, w_EDF.shape[1:], x_TD.dtype)
    return _kernels().gmm(x_TD, w_EDF, sizes_E, x_TD.dtype, tile, interpret=interpret)


def _forward(x_TD, w_EDF, sizes_E, *settings):
    return _product(x_TD, w_EDF, sizes_E, *settings), (x_TD, w_EDF, sizes_E)


def _backward(max_rows, large_vmem, interpret, residuals, dy_TF):
    x_TD, w_EDF, sizes_E = residuals
    D, F = w_EDF.shape[1:]
    tile = _tile(ROWS_TILE[large_vmem], max_rows, (F, D), dy_TF.dtype)
    dx_TD = _kernels().gmm(dy_TF, w_EDF, sizes_E, x_TD.dtype, tile, transpose_rhs=True, interpret=interpret)
    tile = _tile(MATRIX_TILE[large_vmem], max_rows, (D, F), dy_TF.dtype)
    dw_EDF = _kernels().tgmm(x_TD.T, dy_TF, sizes_E, w_EDF.dtype, tile, interpret=interpret)
    return dx_TD, dw_EDF, None


_product.defvjp(_forward, _backward)


def _tile(tile: tuple, max_rows: int, sizes: tuple, dtype) -> tuple:
    """`tile`, limited to the size of the arrays; half as wide for a dtype of twice the size."""
    wide = jnp.dtype(dtype).itemsize // 2
    return (min(tile[0], max_rows), *(min(size, limit // wide) for size, limit in zip(sizes, tile[1:], strict=True)))


def _kernels():
    import importlib  # in the package the function gmm hides the module gmm

    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
