"""Whether arrays fit into memory, asked before they are made.

An allocation that fails ends in an error at best. On a CPU, XLA allocates while it executes, in another thread, and never
completes the buffers of an execution that has failed so (jaxlib 0.10 to 0.12): copying one to the host waits for ever.
`jax.block_until_ready` raises the error, so it comes before each copy. And Linux may kill a process that uses memory which
it was promised.
"""

import sys
from collections.abc import Callable, Iterable, Mapping

import jax

from xfresearch.runtime import distributed, host_memory
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.host_memory import Limit
from xfresearch.runtime.progress import amount
from xfresearch.runtime.tables import count
from xfresearch.sharding.devices import memory_of

WARN_ABOVE = 0.8  # of the memory that is free


def shard_bytes(leaf) -> int:
    """Bytes of one device's shard of an abstract array that has a sharding."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize


def state_bytes(state) -> dict[str, int]:
    """Bytes per device of the parameters and of the optimizer's state, which includes averaged parameters."""
    parts = {name: sum(map(shard_bytes, jax.tree.leaves(tree))) for name, tree in state.items()}
    return {"parameters": parts.pop("params"), "optimizer": sum(parts.values())}


def require_room(
    subject: str, parts: Mapping[str, int], devices: Iterable[jax.Device], advice: Callable[[float], str]
) -> None:
    """Raises UserError if the bytes of all `parts` on each of the devices are more than this process may have there: more
    than an accelerator has, or, on a CPU, whose devices share the memory of the host, than `host_memory.limit`. Warns
    above WARN_ABOVE of what is free. `advice(bytes of a device)`: what would fit."""
    device, times = _sharing(devices)
    total, limit = times * sum(parts.values()), _limit(device)
    listed = ", ".join(f"{name} {amount(times * size, 'B')}" for name, size in parts.items())
    needs = f"{subject} needs {amount(total, 'B')} of memory ({listed})"
    if limit.bytes and total > limit.bytes:
        raise UserError(f"{needs}, and {limit.words} {amount(limit.bytes, 'B')}: {advice(limit.bytes / times)}")
    free = host_memory.free() if device.platform == "cpu" else limit
    if free.bytes and total > WARN_ABOVE * free.bytes and distributed.first():
        print(f"warning: {needs}, and {free.words} {amount(free.bytes, 'B')}: it may not fit", file=sys.stderr)


def room_of(devices: Iterable[jax.Device]) -> float:
    """The bytes that this process may have on each of the devices; 0 if that is not known."""
    device, times = _sharing(devices)
    return _limit(device).bytes / times


def _sharing(devices: Iterable[jax.Device]) -> tuple[jax.Device, int]:
    """The first of the devices of this process, and how many have one memory: on a CPU all have that of the host."""
    here = [device for device in devices if device.process_index == jax.process_index()]
    return here[0], len(here) if here[0].platform == "cpu" else 1


def _limit(device: jax.Device) -> Limit:
    if device.platform == "cpu":
        return host_memory.limit()
    return Limit(memory_of(device), f"JAX may use of each {device.device_kind}")


def require_room_for(params: dict, path) -> None:
    """Raises UserError if abstract parameters, which have shardings, do not fit into memory. `path`: the model's."""
    leaves = jax.tree.leaves(params)
    size, parameters = sum(map(shard_bytes, leaves)), sum(leaf.size for leaf in leaves)

    def advice(available: float) -> str:
        return f"{count(parameters * available / size)} parameters like these would fit"

    parts = {f"{count(parameters)} parameters": size}
    require_room(f"the model of {path}", parts, leaves[0].sharding.device_set, advice)
