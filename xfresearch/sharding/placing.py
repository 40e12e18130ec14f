"""Which rows of a batch this process needs, and the batch as global arrays made from them.

The rows follow from the mesh: processes that share rows (those along `tensor`, or along `context`, where each holds other
positions of them) read the same ones, and a process reads no row that none of its devices holds.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from xfresearch.errors import require
from xfresearch.sharding.letters import row_parts
from xfresearch.sharding.partition import batch_sharding


def rows_of(sharding: Sharding, shape: tuple[int, int]) -> np.ndarray:
    """The rows, ascending, of a [B, L] array that this process's devices hold any part of."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[0])[rows] for rows, _ in held]))


def place(sharding: Sharding, shape: tuple[int, int], rows: Sequence[int], batch: dict[str, np.ndarray]) -> dict:
    """Arrays of `shape` laid out by `sharding`, from the `rows` of them that this process has read."""

    def part_of(values: np.ndarray):
        def part(index):
            first, last, _ = index[0].indices(shape[0])
            begin = int(np.searchsorted(rows, first))
            return values[begin : begin + last - first, index[1]]

        return part

    return {name: jax.make_array_from_callback(shape, sharding, part_of(values)) for name, values in batch.items()}


def on(mesh: Mesh | None, batch_size: int, length: int) -> tuple[int, Callable]:
    """The next larger batch size that `mesh` can cut, and what lays such batches, read whole, over it."""
    if mesh is None:
        return batch_size, lambda batch: batch
    require(length % mesh.shape["context"] == 0, "sequence_length", length, "a multiple of mesh.context")
    batch_size = even(mesh, batch_size)
    return batch_size, lambda batch: place(batch_sharding(mesh), (batch_size, length), range(batch_size), batch)


def even(mesh: Mesh | None, batch_size: int) -> int:
    """The next larger batch size that `mesh` can cut."""
    cut = 1 if mesh is None else row_parts(mesh.shape)
    return -(-batch_size // cut) * cut
