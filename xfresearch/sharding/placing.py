"""The rows of a batch that this process reads, and the global arrays made from them.

The mesh determines the rows. Processes along `tensor`, or along `context`, read the same rows: along `context` each holds
other positions of them. A process reads only rows of which its devices hold a part.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from xfresearch.runtime.errors import require
from xfresearch.sharding.letters import row_parts
from xfresearch.sharding.partition import batch_sharding


def local_rows(sharding: Sharding, shape: tuple[int, int]) -> np.ndarray:
    """The rows, ascending, of a [B, L] array of which this process's devices hold any part."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(shape[0])[rows] for rows, _ in filter(None, held)]))


def place(
    sharding: Sharding, shape: tuple[int, int], rows: Sequence[int] | np.ndarray, batch: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Global arrays with the rows of `shape` and this sharding. `batch` has the `rows` that this process has read, of any
    length: a source may be longer or shorter."""

    def shard_of(values: np.ndarray):
        def shard(index):
            first, last, _ = index[0].indices(shape[0])
            begin = int(np.searchsorted(rows, first))
            return values[begin : begin + last - first, index[1]]

        return shard

    return {name: _made((shape[0], *values.shape[1:]), sharding, shard_of(values)) for name, values in batch.items()}


def replicated(mesh: Mesh | None, values: np.ndarray) -> jax.Array:
    """An array that every device holds in full. Each process has all `values`."""
    if mesh is None:
        return jax.device_put(values)
    return _made(values.shape, NamedSharding(mesh, PartitionSpec()), lambda index: values[index])


def _made(shape: tuple[int, ...], sharding: Sharding, shard: Callable) -> jax.Array:
    """jax.make_array_from_callback, which needs no agreement of processes. jax.transfer_guard takes it for an implicit
    transfer; here it is meant."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, shard)


def batch_placer(mesh: Mesh | None, batch_size: int, length: int) -> tuple[int, Callable]:
    """The batch size rounded up to one that the mesh divides, and a function that shards whole batches of that size."""
    if mesh is None:
        return batch_size, lambda batch: batch
    require(length % mesh.shape["context"] == 0, "sequence_length", length, "a multiple of mesh.context")
    batch_size = round_up(mesh, batch_size)
    return batch_size, lambda batch: place(batch_sharding(mesh), (batch_size, length), range(batch_size), batch)


def round_up(mesh: Mesh | None, batch_size: int) -> int:
    """The smallest batch size from `batch_size` on that the mesh divides."""
    shards = 1 if mesh is None else row_parts(mesh.shape)
    return -(-batch_size // shards) * shards
