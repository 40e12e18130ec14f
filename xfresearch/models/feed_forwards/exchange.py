"""Exchanges rows between the devices along a mesh axis. Each pair of devices may exchange a different number of rows
(jax.lax.ragged_all_to_all).

Each device has rows sorted by group. The groups are sharded over the devices, in order: device j receives the rows of
its groups from every device, again sorted by group. Rows move directly to their final positions, one slice for each
pair of a device and a group. The way back and the gradient use the same slices in the opposite direction.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slices(NamedTuple):
    """Slices of one device's rows [P, e]: those exchanged with device p, of group e of the receiving device."""

    here: jax.Array  # first row on this device
    sizes: jax.Array
    there: jax.Array  # first row on device p


class Route(NamedTuple):
    """The slices that a device sends and receives along a mesh axis."""

    out: Slices
    into: Slices
    axis: str  # of the mesh

    def back(self) -> "Route":
        """The route in the opposite direction."""
        return Route(self.into, self.out, self.axis)


def route(sizes_E, axis: str, parts: int) -> tuple[Route, jax.Array]:
    """The route of rows in E groups of `sizes` to the devices of their groups, and the sizes of this device's groups
    after the exchange."""
    sizes_PPe = jax.lax.all_gather(sizes_E, axis).reshape(parts, parts, -1)  # sender, receiver, group of the receiver
    me = jax.lax.axis_index(axis)
    source_PPe = _sum_before(sizes_PPe.reshape(parts, -1), 1).reshape(sizes_PPe.shape)
    target_PPe = _sum_before(sizes_PPe.sum(0), 1) + _sum_before(sizes_PPe, 0)
    out = Slices(source_PPe[me], sizes_PPe[me], target_PPe[me])
    into = Slices(target_PPe[:, me], sizes_PPe[:, me], source_PPe[:, me])
    return Route(out, into, axis), sizes_PPe[:, me].sum(0)


def has_ragged(platform: str, kind: str, devices: int) -> bool:
    """Whether XLA supports ragged all-to-all: not on CPU, nor on more than 16 v5e chips (libtpu 0.0.42 rejects it)."""
    return platform != "cpu" and not (kind == "TPU v5 lite" and devices > 16)


def exchange(x_ND, way: Route, rows: int, ragged: bool):
    """y_RD: the rows that arrive along `way`, in a buffer of `rows` rows; unused rows are 0.

    Without a `ragged` all-to-all, every device sends every other one the largest number of rows that can occur.
    """
    return _exchange(x_ND, way.out, way.into, way.axis, rows, ragged)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _exchange(x_ND, out: Slices, into: Slices, axis: str, rows: int, ragged: bool):
    if not ragged:
        return _padded(x_ND, out, into, axis, rows)
    slices = (a.reshape(-1).astype(jnp.int32) for a in (*out, into.sizes))
    return jax.lax.ragged_all_to_all(x_ND, jnp.zeros((rows, x_ND.shape[1]), x_ND.dtype), *slices, axis_name=axis)


def _forward(x_ND, out, into, axis, rows, ragged):
    return _exchange(x_ND, out, into, axis, rows, ragged), (x_ND.shape[0], out, into)


def _backward(axis, rows, ragged, residuals, dy_RD):
    sent, out, into = residuals
    return _exchange(dy_RD, into, out, axis, sent, ragged), None, None


_exchange.defvjp(_forward, _backward)


def _padded(x_ND, out: Slices, into: Slices, axis: str, rows: int):
    width = min(x_ND.shape[0], rows)  # the most rows that a pair of devices can exchange
    source_PW = jax.vmap(partial(_rows, width=width, none=x_ND.shape[0]))(out.here, out.sizes)
    x_PWD = jax.lax.all_to_all(x_ND.at[source_PW].get(mode="fill", fill_value=0), axis, 0, 0)
    target_PW = jax.vmap(partial(_rows, width=width, none=rows))(into.here, into.sizes)
    return jnp.zeros((rows, x_ND.shape[1]), x_ND.dtype).at[target_PW].set(x_PWD, mode="drop")


def _rows(here_e, sizes_e, width: int, none: int):
    """Indices [W] of the rows of slices that start at `here`, one slice after another. The rest of W is `none`."""
    ends_e = jnp.cumsum(sizes_e)
    at_W = jnp.arange(width)
    slice_W = jnp.searchsorted(ends_e, at_W, side="right").clip(max=len(sizes_e) - 1)
    row_W = here_e[slice_W] + at_W - (ends_e - sizes_e)[slice_W]
    return jnp.where(at_W < ends_e[-1], row_W, none)


def _sum_before(sizes, axis: int):
    """For each entry, the sum of the entries before it along `axis`."""
    return jnp.cumsum(sizes, axis) - sizes
