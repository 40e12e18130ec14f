"""The mesh, and the one table from a dimension's letter (models/axes.py) to the mesh axis that cuts it.

Batches are cut over `data`, `fsdp` and `expert` by row and over `context` by position. Nothing is annotated in the model:
the compiler spreads these shardings through the step.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xfresearch.config import Config, MeshConfig
from xfresearch.errors import UserError, require
from xfresearch.models.axes import axes_of, path_name

RULES = {"V": "tensor", "D": "fsdp", "H": "tensor", "G": "tensor", "F": "tensor", "E": "expert"}
RULES |= dict.fromkeys("NKMLRU")  # never cut
BATCH = PartitionSpec(("data", "fsdp", "expert"), "context")


def mesh_sizes(mesh: MeshConfig, devices: int) -> dict[str, int]:
    """The size of each axis, `data` inferred where it is -1; UserError where they do not make up the devices."""
    sizes = dict(vars(mesh))
    require(0 not in sizes.values(), "mesh.data", mesh.data, "at least 1, or -1 for every device left over")
    others = int(np.prod([size for name, size in sizes.items() if name != "data"]))
    if sizes["data"] == -1:
        require(devices % others == 0, "mesh", sizes, f"axes whose product divides the {devices} devices here")
        sizes["data"] = devices // others
    require(sizes["data"] * others == devices, "mesh", sizes, f"axes whose product is the {devices} devices here")
    return sizes


def check_batch(sizes: dict[str, int], batch_size: int, sequence_length: int, accumulate: int) -> None:
    """UserError where a microbatch's rows or positions cannot be cut over the mesh."""
    rows, context = sizes["data"] * sizes["fsdp"] * sizes["expert"], sizes["context"]
    needs = f"a multiple of training.accumulate * mesh data * fsdp * expert = {rows * accumulate}"
    require(batch_size % (rows * accumulate) == 0, "batch_size", batch_size, needs)
    require(sequence_length % context == 0, "sequence_length", sequence_length, f"a multiple of mesh.context={context}")


def make_mesh(config: Config) -> Mesh:
    """The mesh over all devices; UserError where they do not fit it or a batch cannot be cut over it."""
    sizes = mesh_sizes(config.mesh, jax.device_count())
    check_batch(sizes, config.batch_size, config.sequence_length, config.training.accumulate)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def param_shardings(mesh, params):
    """The tree of NamedShardings for (possibly abstract) `params` on a concrete or abstract mesh.

    UserError for a dimension that its mesh axis does not divide; ValueError for a parameter without exactly one rule.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(mesh, path_name(path), leaf.shape)), params
    )


def _spec(mesh, path: str, shape: tuple) -> PartitionSpec:
    # One key-value head (multi-query) is every device's: there is nothing to cut.
    letters = axes_of(path, len(shape)).letters
    names = [None if (letter, size) == ("G", 1) else RULES[letter] for letter, size in zip(letters, shape, strict=True)]
    used = [name for name in names if name]
    if len(used) != len(set(used)):
        raise ValueError(f"parameter {path}: two of its dimensions are cut by one mesh axis: {names}")
    for name, size in zip(names, shape, strict=True):
        if name and size % mesh.shape[name]:
            raise UserError(
                f"config.mesh.{name}={mesh.shape[name]} does not divide {size}, a dimension of parameter {path} {shape}"
            )
    return PartitionSpec(*names)


def state_shardings(mesh, state):
    """Shardings of a training state: arrays shaped like the parameter whose path theirs ends in are cut like it,
    everything else (counters, factored moments) is replicated."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state["params"])
    known = {path_name(path): leaf.shape for path, leaf in flat}

    def place(path, leaf):
        parts = path_name(path).split("/")
        for start in range(len(parts)):
            name = "/".join(parts[start:])
            if known.get(name) == leaf.shape:
                return NamedSharding(mesh, _spec(mesh, name, leaf.shape))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, state)


def batch_sharding(mesh) -> NamedSharding:
    return NamedSharding(mesh, BATCH)
