"""Rows between the devices along a mesh axis, as many from each to each as there are: jax.lax.ragged_all_to_all.

Each device has its rows sorted by group. Groups are cut over the devices, in order: device j gets those of its groups, from
every device, and has them sorted by group again. Rows move straight to where they belong, one slice for each pair of a
device and a group; the way back and the gradient are the same slices, the other way.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slices(NamedTuple):
    """The slices of one device's rows [P, e], those shared with device p and of the group e of the receiver's."""

    here: jax.Array  # first row
    sizes: jax.Array
    there: jax.Array  # first row on device p


class Route(NamedTuple):
    out: Slices
    into: Slices
    axis: str  # of the mesh

    def back(self) -> "Route":
        return Route(self.into, self.out, self.axis)


def route(sizes_E, axis: str, parts: int) -> tuple[Route, jax.Array]:
    """How rows in E groups of `sizes` go to the devices of their groups, and the sizes of this device's groups then."""
    sizes_PPe = jax.lax.all_gather(sizes_E, axis).reshape(parts, parts, -1)  # from, to, group of the receiver's
    me = jax.lax.axis_index(axis)
    left_PPe = _before(sizes_PPe.reshape(parts, -1), 1).reshape(sizes_PPe.shape)
    put_PPe = _before(sizes_PPe.sum(0), 1) + _before(sizes_PPe, 0)
    out = Slices(left_PPe[me], sizes_PPe[me], put_PPe[me])
    into = Slices(put_PPe[:, me], sizes_PPe[:, me], left_PPe[:, me])
    return Route(out, into, axis), sizes_PPe[:, me].sum(0)


def has_ragged(platform: str, kind: str, devices: int) -> bool:
    """Whether XLA has a ragged all-to-all there: not on CPU, nor above 16 chips of v5e (libtpu 0.0.42 refuses it)."""
    return platform != "cpu" and not (kind == "TPU v5 lite" and devices > 16)


def exchange(x_ND, way: Route, rows: int, ragged: bool):
    """y_RD: the rows that come along `way`, in a buffer of so many `rows`, zeros where none has come.

    Where there is no `ragged` all-to-all, every device sends each other one as many rows as could have to go.
    """
    return _exchange(x_ND, way.out, way.into, way.axis, rows, ragged)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _exchange(x_ND, out: Slices, into: Slices, axis: str, rows: int, ragged: bool):
    if not ragged:
        return _padded(x_ND, out, into, axis, rows)
    places = (a.reshape(-1).astype(jnp.int32) for a in (*out, into.sizes))
    return jax.lax.ragged_all_to_all(x_ND, jnp.zeros((rows, x_ND.shape[1]), x_ND.dtype), *places, axis_name=axis)


def _forward(x_ND, out, into, axis, rows, ragged):
    return _exchange(x_ND, out, into, axis, rows, ragged), (x_ND.shape[0], out, into)


def _backward(axis, rows, ragged, residuals, dy_RD):
    sent, out, into = residuals
    return _exchange(dy_RD, into, out, axis, sent, ragged), None, None


_exchange.defvjp(_forward, _backward)


def _padded(x_ND, out: Slices, into: Slices, axis: str, rows: int):
    width = min(x_ND.shape[0], rows)  # no pair of devices shares more
    sent_PW = jax.vmap(partial(_rows, width=width, none=x_ND.shape[0]))(out.here, out.sizes)
    x_PWD = jax.lax.all_to_all(x_ND.at[sent_PW].get(mode="fill", fill_value=0), axis, 0, 0)
    put_PW = jax.vmap(partial(_rows, width=width, none=rows))(into.here, into.sizes)
    return jnp.zeros((rows, x_ND.shape[1]), x_ND.dtype).at[put_PW].set(x_PWD, mode="drop")


def _rows(here_e, sizes_e, width: int, none: int):
    """Indices [W] of the rows of slices that begin at `here`, one slice after another; `none` after the last."""
    ends_e, at_W = jnp.cumsum(sizes_e), jnp.arange(width)
    slice_W = jnp.searchsorted(ends_e, at_W, side="right").clip(max=len(sizes_e) - 1)
    row_W = here_e[slice_W] + at_W - (ends_e - sizes_e)[slice_W]
    return jnp.where(at_W < ends_e[-1], row_W, none)


def _before(sizes, axis: int):
    """Of each entry, the sum of those before it along `axis`."""
    return jnp.cumsum(sizes, axis) - sizes
