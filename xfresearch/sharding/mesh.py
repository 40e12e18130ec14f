"""The device mesh of a run.

`data`, `fsdp` and `expert` shard the rows of the batch. `fsdp` also shards the parameters: they are gathered for use,
and their gradients are scattered. `expert` also shards the experts: tokens are sent to them and back. `tensor` shards
heads, hidden units and the vocabulary, `context` the sequence. SHARDED_BY in letters.py lists the axes of each
dimension. With several slices (a fast network inside each, a slower one between them), one axis, `mesh.between`, spans
the slices.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from xfresearch.options.run_options import MeshConfig, RunConfig
from xfresearch.runtime.errors import UserError, require
from xfresearch.sharding.letters import row_parts

AXES = ("data", "fsdp", "expert", "tensor", "context")


def mesh_sizes(mesh: MeshConfig, devices: int) -> dict[str, int]:
    """The size of each axis, with -1 inferred. Raises UserError if their product is not the number of devices."""
    sizes = {name: getattr(mesh, name) for name in AXES}
    for name, size in sizes.items():
        require(size != 0, f"mesh.{name}", size, "at least 1, or -1 for every device left over")
    inferred = [name for name, size in sizes.items() if size == -1]
    if len(inferred) > 1:
        raise UserError(
            f"config.mesh.{inferred[1]}=-1 is not allowed: mesh.{inferred[0]} is -1 already, and only one axis may be"
        )
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    for name in inferred:
        require(devices % known == 0, "mesh", sizes, f"axes whose product divides the {devices} devices here")
        sizes[name] = devices // known
    product = int(np.prod(list(sizes.values())))
    require(product == devices, "mesh", sizes, f"axes whose product is the {devices} devices here")
    return sizes


def check_batch(
    sizes: dict[str, int], batch_size: int, sequence_length: int, accumulate: int, source_length: int = 0
) -> None:
    """Raises UserError if the mesh does not divide the rows or the positions of a microbatch."""
    rows = row_parts(sizes)
    context = sizes["context"]
    needs = f"a multiple of training.accumulate * mesh data * fsdp * expert = {rows * accumulate}"
    require(batch_size % (rows * accumulate) == 0, "batch_size", batch_size, needs)
    for name, length in (("sequence_length", sequence_length), ("source_length", source_length)):
        require(length % context == 0, name, length, f"a multiple of mesh.context={context}")


def make_mesh(config: RunConfig, devices=None) -> Mesh:
    """The mesh over `devices` (default: all), ordered for their network.

    Raises UserError if the mesh does not fit the devices, does not divide the batch, or if mesh.between cannot span the
    slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config.mesh, len(devices))
    lengths = config.sequence_length, config.training.accumulate, config.source_length
    check_batch(sizes, config.batch_size, *lengths)
    return device_mesh(sizes, devices, config.mesh.between)


def device_mesh(sizes: dict[str, int], devices, between: str) -> Mesh:
    """The mesh of `sizes` over `devices`. Only the axis `between` crosses slices."""
    from jax.experimental import mesh_utils

    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        array = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    else:
        between = spread_axis(sizes, slices, between)
        inside = {name: size // slices if name == between else size for name, size in sizes.items()}
        across = [slices if name == between else 1 for name in sizes]
        array = mesh_utils.create_hybrid_device_mesh(
            tuple(inside.values()), across, devices, allow_split_physical_axes=True
        )
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def spread_axis(sizes: dict[str, int], slices: int, between: str) -> str:
    """The axis that spans the slices: mesh.between, or the first possible for 'auto'. Raises UserError if none can."""
    possible = [name for name in ([*sizes] if between == "auto" else [between]) if sizes[name] % slices == 0]
    allowed = f"sizes of which one ({between}, by mesh.between) is a multiple of {slices} slices"
    require(bool(possible), "mesh", sizes, allowed)
    return possible[0]
