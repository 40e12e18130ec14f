"""A function of rows and of the matrices of each row's group (expert), in plain JAX, block by block.

Rows are sorted by group. A loop processes each group's rows in blocks, and keeps all values of a block in the caches: a
whole expert reads and writes a row once. The last block of a group extends into other groups' rows; a mask keeps those
rows as they are. So no rows are padded. The FLOPs are those of `computed_rows` rows, on average T + E block / 2 and
always less than T + E block, in the forward pass and in each part of the backward pass.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype

BIAS = "_bias"  # weights[name + BIAS] is the bias of weights[name]


def computed_rows(sizes_E, block: int) -> int:
    """Number of rows that a product of `by_block` multiplies: the rows of each group, rounded up to whole blocks."""
    block = min(block, int(sum(sizes_E)))
    return sum(int(_blocks(size, block)) * block for size in sizes_E)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5))
def by_block(function: Callable, rows: tuple, weights: dict, sizes_E, block: int, saved: tuple[str, ...] = ()):
    """y_TO = function(products, *rows): products(x, names, gates) returns for each name the product of each row of x with
    the matrix weights[name][e] of the row's group e, with its bias (`with_bias`). Rows beyond the sum of sizes are not read;
    their outputs and gradients are zeros.

    rows: arrays [T, I], sorted by group, sizes_E rows in each. weights: {name: [E, I, O]}, and {name + BIAS: [E, O]} of
    those with a bias. block: rows of a block.
    saved: names of products whose results the backward pass reads. It computes the other values again.
    """
    return _forward(function, rows, weights, sizes_E, block, saved)[0]


def _forward(function, rows, weights, sizes_E, block: int, saved):
    T = rows[0].shape[0]
    block = min(block, T)

    def results(weights, rows):
        """y of a block, and the products to save."""
        values = {}

        def products(x, names: tuple[str, ...], gates=None):
            values.update({name: _product(x, weights[name]) for name in names})
            return [with_bias(values[name], weights.get(name + BIAS), gates) for name in names]

        return function(products, *rows), {name: values[name] for name in saved}

    def group(values, inputs):
        weights, start, size = inputs

        def step(i, values):
            at, own_N1 = _place(start, size, i, block, T)
            return _write(values, results(weights, _read(rows, at, block)), at, own_N1)

        return jax.lax.fori_loop(0, _blocks(size, block), step, values), None

    shapes = jax.eval_shape(results, *jax.tree.map(lambda x: x[0], (weights,)), _read(rows, 0, block))
    zeros = jax.tree.map(lambda shape: jnp.zeros((T, *shape.shape[1:]), shape.dtype), shapes)
    y_TO, kept = jax.lax.scan(group, zeros, (weights, _starts(sizes_E), sizes_E))[0]
    return y_TO, (rows, weights, sizes_E, kept)


def _backward(function, block: int, saved, residuals, dy_TO):
    rows, weights, sizes_E, kept = residuals
    T = rows[0].shape[0]
    block = min(block, T)

    def gradients(weights, at, own_N1):
        """The gradients of a group's matrices, in float32 or wider, and of the rows of a block."""
        known = _read(kept, at, block)

        def outputs(zeros, rows):
            def product(x, name: str, gates):
                y = _differentiable(x, weights[name], zeros[name], known.get(name))
                bias = weights[name + BIAS] + zeros[name + BIAS] if name + BIAS in weights else None
                return with_bias(y, bias, gates)

            return function(lambda x, names, gates=None: [product(x, name, gates) for name in names], *rows)

        _, vjp = jax.vjp(outputs, _wide_zeros(weights), _read(rows, at, block))
        return vjp(jnp.where(own_N1, _slice(dy_TO, at, block), 0))

    def group(drows, inputs):
        weights, start, size = inputs

        def step(i, carry):
            drows, dweights = carry
            at, own_N1 = _place(start, size, i, block, T)
            dw, dr = gradients(weights, at, own_N1)
            return _write(drows, dr, at, own_N1), jax.tree.map(jnp.add, dweights, dw)

        return jax.lax.fori_loop(0, _blocks(size, block), step, (drows, _wide_zeros(weights)))

    drows, dweights = jax.lax.scan(group, jax.tree.map(jnp.zeros_like, rows), (weights, _starts(sizes_E), sizes_E))
    return drows, jax.tree.map(lambda dw, w: dw.astype(w.dtype), dweights, weights), None


by_block.defvjp(_forward, _backward)


def with_bias(y_NO, bias, gates_N1=None):
    """y_NO + gates_N1 * bias. The bias is [O], shared by all rows, or [N, O]; None adds nothing. The sum is computed in the
    dtype of the bias, float32 or wider, because the bias's gradient is a sum over rows."""
    if bias is None:
        return y_NO
    bias = bias.astype(wide_dtype(bias))
    return (y_NO.astype(bias.dtype) + (bias if gates_N1 is None else gates_N1.astype(bias.dtype) * bias)).astype(y_NO.dtype)


def _product(x_NI, w_IO):
    return jnp.einsum("NI,IO->NO", x_NI, w_IO, preferred_element_type=wide_dtype(x_NI)).astype(x_NI.dtype)


@jax.custom_vjp
def _differentiable(x_NI, w_IO, zeros_IO, known_NO):
    """x w; `known` is this product if it was saved. The gradient of w becomes that of `zeros`, whose dtype is wider."""
    return _product(x_NI, w_IO) if known_NO is None else known_NO


def _differentiable_forward(x_NI, w_IO, zeros_IO, known_NO):
    return _differentiable(x_NI, w_IO, zeros_IO, known_NO), (x_NI, w_IO)


def _differentiable_backward(residuals, dy_NO):
    x_NI, w_IO = residuals
    dx_NI = jnp.einsum("NO,IO->NI", dy_NO, w_IO, preferred_element_type=wide_dtype(dy_NO)).astype(x_NI.dtype)
    return dx_NI, None, jnp.einsum("NI,NO->IO", x_NI, dy_NO, preferred_element_type=wide_dtype(x_NI)), None


_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


def _place(start, size, i, block: int, T: int):
    """The first row of block i of a group, and which of its rows [block, 1] are the group's and not of an earlier block."""
    begin = start + i * block
    at = jnp.minimum(begin, T - block)
    row_N = at + jnp.arange(block)
    return at, ((row_N >= begin) & (row_N < start + size))[:, None]


def _read(arrays, at, block: int):
    return jax.tree.map(lambda x: _slice(x, at, block), arrays)


def _write(arrays, values, at, own_N1):
    """`arrays` with new rows from `at` on: those of the block `values` that belong to the group (own_N1)."""

    def put(x, new):
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(own_N1, new, _slice(x, at, len(own_N1))), at, 0)

    return jax.tree.map(put, arrays, values)


def _slice(x, at, block: int):
    return jax.lax.dynamic_slice_in_dim(x, at, block)


def _wide_zeros(weights):
    return jax.tree.map(lambda w: jnp.zeros(w.shape, wide_dtype(w)), weights)


def _starts(sizes_E):
    return jnp.cumsum(sizes_E) - sizes_E


def _blocks(size, block: int):
    return (size + block - 1) // block
