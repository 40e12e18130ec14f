"""Replicas of a state: which devices of a mesh hold the same shards, and how a device that lost its shards gets them back.

Parameters and optimizer state are sharded along PARAMETER_AXES. Devices along the other axes of the mesh hold the same
shards: they are replicas of each other.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xfresearch.sharding.partition import PARAMETER_AXES


def is_replicated(mesh: Mesh, machines: list[int]) -> bool:
    """Whether every shard is on at least two machines; on two slices if there are several, because a slice fails as a whole.
    `machines` has the number of each process's machine."""
    slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    failing = slices if len(set(slices)) > 1 else [machines[device.process_index] for device in mesh.devices.flat]
    return all(len(set(holders)) > 1 for holders in _replicas_and_shards(mesh, np.array(failing)).T)


def shards_of(mesh: Mesh, process: int) -> set[int]:
    """The numbers of the shards that the devices of a process have. Replicas of a shard have the same number."""
    here = _replicas_and_shards(mesh, np.array([device.process_index == process for device in mesh.devices.flat]))
    return set(np.flatnonzero(here.any(0)).tolist())


def sources(mesh: Mesh, processes: set[int]) -> np.ndarray | None:
    """bool, of the shape of the mesh: for each shard, one device of `processes` whose copy all replicas get. None if a shard
    is on no device of these processes."""
    held = _replicas_and_shards(mesh, np.array([device.process_index in processes for device in mesh.devices.flat]))
    if not held.any(0).all():
        return None
    first = np.arange(len(held))[:, None] == held.argmax(0)
    order = _replica_axes_first(mesh)
    return first.reshape([mesh.devices.shape[axis] for axis in order]).transpose(np.argsort(order))


def sent(mesh: Mesh, tree, chosen: np.ndarray):
    """A tree of arrays on the mesh in which all replicas have the shards of the `chosen` devices (`sources`), bit for bit:
    they are sent as a sum of integers, because a sum of numbers turns -0.0 into 0.0. The arrays are donated. Every process
    calls this."""
    leaves = jax.tree.leaves(tree)
    everywhere = PartitionSpec(*mesh.axis_names)
    flags = jax.make_array_from_callback(mesh.devices.shape, NamedSharding(mesh, everywhere), lambda index: chosen[index])
    specs = [leaf.sharding.spec for leaf in leaves]
    axes = [name for name in mesh.axis_names if name not in PARAMETER_AXES]

    def on_device(flag, leaves):
        return [_of_bits(jax.lax.psum(jnp.where(flag.reshape(()), _bits(x), 0), axes), x.dtype) for x in leaves]

    send = jax.shard_map(on_device, mesh=mesh, in_specs=(everywhere, specs), out_specs=specs, check_vma=False)
    return jax.tree.unflatten(jax.tree.structure(tree), jax.jit(send, donate_argnums=1)(flags, leaves))


def zeros(tree):
    """Arrays of zeros like the sharded jax.ShapeDtypeStructs of a tree. A process makes its own, and waits for no other."""

    def shards(leaf):
        shape = leaf.sharding.shard_shape(leaf.shape)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: np.zeros(shape, leaf.dtype))

    return jax.tree.map(shards, tree)


def _replicas_and_shards(mesh: Mesh, values: np.ndarray) -> np.ndarray:
    """[replicas, shards] of one value for each device, in the order of the mesh."""
    replicas = np.prod([size for name, size in mesh.shape.items() if name not in PARAMETER_AXES], dtype=int)
    return values.reshape(mesh.devices.shape).transpose(_replica_axes_first(mesh)).reshape(replicas, -1)


def _replica_axes_first(mesh: Mesh) -> list[int]:
    return sorted(range(len(mesh.axis_names)), key=lambda axis: mesh.axis_names[axis] in PARAMETER_AXES)


def _bits(x):
    """The bits of an array as unsigned integers of at least 32 bits: not every backend adds smaller ones."""
    if x.dtype.kind == "b":
        return x.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return bits.astype(jnp.uint32) if x.dtype.itemsize < 4 else bits


def _of_bits(bits, dtype):
    if dtype.kind == "b":
        return bits.astype(bool)
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)
