"""PartitionSpecs of arrays whose dimensions have letters (letters.py).

Without a mesh, an array is on one device, or the compiler decides.
"""

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from xfresearch.errors import UserError
from xfresearch.sharding.letters import BATCH, SHARDED_BY
from xfresearch.trees import path_name

# Mesh axes that shard parameters, and which dimension of them.
PARAMETER_AXES = {"fsdp": "the width D", "expert": "experts E", "tensor": "heads H, hidden units F or the vocabulary V"}


def parameter_spec(mesh, letters: str, shape: tuple, name: str) -> PartitionSpec:
    """The PartitionSpec of the parameter `name`; errors as of `_spec`."""
    return _spec(mesh, letters, shape, f"parameter {name}", 0)


def activation_spec(mesh, letters: str, shape: tuple) -> PartitionSpec:
    """The PartitionSpec of an activation; errors as of `_spec`."""
    return _spec(mesh, letters, shape, f"activation {letters}", 1)


def _spec(mesh, letters: str, shape: tuple, name: str, column: int) -> PartitionSpec:
    """UserError for a dimension that its mesh axes do not divide; ValueError where one mesh axis shards two dimensions."""
    # One key-value head (multi-query) is on every device: there is nothing to shard.
    by_dimension = [
        () if (letter, size) == ("G", 1) else SHARDED_BY[letter][column]
        for letter, size in zip(letters, shape, strict=True)
    ]
    used = [axis for axes in by_dimension for axis in axes]
    if len(used) != len(set(used)):
        raise ValueError(f"{name} {shape}: one mesh axis shards two of its dimensions: {by_dimension}")
    for axes, size in zip(by_dimension, shape, strict=True):
        for axis in axes:
            if size % mesh.shape[axis]:
                raise UserError(
                    f"config.mesh.{axis}={mesh.shape[axis]} does not divide {size}, a dimension of {name} {shape}"
                )
            size //= mesh.shape[axis]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in by_dimension))


def constrain(mesh, x, letters: str):
    """x with the sharding of its letters; x itself without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(mesh, letters, x.shape)))


def constrain_parameters(mesh, module, name: str):
    """`module` with the sharding of each of its parameters, which their gradients get too. Stated here, a gradient is summed
    and scattered in one step; left to the compiler, it is first summed whole on every device."""
    if mesh is None:
        return module

    def place(path, variable):
        value = variable[...]
        spec = parameter_spec(mesh, variable.axes.letters, value.shape, f"{name}/{path_name(path)}")
        return variable.replace(jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec)))

    return jax.tree_util.tree_map_with_path(place, module, is_leaf=lambda x: isinstance(x, nnx.Variable))


def param_shardings(mesh, params, axes):
    """The tree of NamedShardings of (possibly abstract) `params`, whose letters are the tree `axes`, on a concrete or
    abstract mesh.

    UserError for a dimension that its mesh axis does not divide, or a mesh axis that shards no parameter although it should.
    """

    def sharding(path, leaf, axes):
        return NamedSharding(mesh, parameter_spec(mesh, axes.letters, leaf.shape, path_name(path)))

    shardings = jax.tree_util.tree_map_with_path(sharding, params, axes)
    used = {axis for sharding in jax.tree.leaves(shardings) for axis in sharding.spec}
    for axis, what in PARAMETER_AXES.items():
        if mesh.shape[axis] > 1 and axis not in used:
            raise UserError(f"config.mesh.{axis}={mesh.shape[axis]} is not allowed: this model has no {what} to shard")
    return shardings


def state_shardings(mesh, state, axes):
    """Shardings of a training state. An array with the shape of the parameter in whose path its own path ends is sharded
    like that parameter; all others (counters, factored moments) are replicated. `axes` and errors as of `param_shardings`."""
    shardings = param_shardings(mesh, state["params"], axes)
    shapes = jax.tree_util.tree_leaves_with_path(state["params"])
    known = {
        path_name(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(shapes, jax.tree.leaves(shardings), strict=True)
    }
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(path, leaf):
        parts = path_name(path).split("/")
        endings = ("/".join(parts[start:]) for start in range(len(parts)))
        found = (known[ending] for ending in endings if ending in known)
        return next((sharding for shape, sharding in found if shape == leaf.shape), replicated)

    return jax.tree_util.tree_map_with_path(place, state)


def batch_sharding(mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH, "context"))
