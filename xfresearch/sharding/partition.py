"""PartitionSpecs of arrays whose dimensions have letters (letters.py).

Without a mesh, an array is on one device or the compiler decides.
"""

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.trees import path_name
from xfresearch.sharding.letters import BATCH, DIMENSIONS, SHARDED_BY

# Mesh axes that shard parameters, and the dimensions that they shard.
PARAMETER_AXES = {"fsdp": "the width D", "expert": "experts E", "tensor": "heads H, hidden units F or the vocabulary V"}


def parameter_spec(mesh, letters: str, shape: tuple, name: str) -> PartitionSpec:
    """The PartitionSpec of the parameter `name`. Raises as `_spec` does."""
    return _spec(mesh, letters, shape, f"parameter {name}", 0)


def activation_spec(mesh, letters: str, shape: tuple) -> PartitionSpec:
    """The PartitionSpec of an activation. Raises as `_spec` does."""
    return _spec(mesh, letters, shape, f"activation {letters}", 1)


def _spec(mesh, letters: str, shape: tuple, name: str, column: int) -> PartitionSpec:
    """Raises UserError if an axis does not divide its dimension, ValueError if one axis shards two dimensions."""
    # Multi-query attention has one key-value head: it cannot be sharded, so every device has it.
    by_dimension = [
        () if (letter, size) == ("G", 1) else SHARDED_BY[letter][column]
        for letter, size in zip(letters, shape, strict=True)
    ]
    used = [axis for axes in by_dimension for axis in axes]
    if len(used) != len(set(used)):
        raise ValueError(f"{name} {shape}: one mesh axis shards two of its dimensions: {by_dimension}")
    for letter, axes, size in zip(letters, by_dimension, shape, strict=True):
        for axis in axes:
            parts = mesh.shape[axis]
            require(size % parts == 0, f"mesh.{axis}", parts, _divisor(size, parts, axis, letter, name))
            size //= parts
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in by_dimension))


def _divisor(size: int, parts: int, axis: str, letter: str, name: str) -> str:
    """What is allowed for an axis that does not divide a dimension, and what to do about it."""
    dimension, option = DIMENSIONS[letter]
    other = f"another {option}"
    if letter == "V":  # ids beyond the tokenizer's are allowed, and never occur
        other = f"a larger vocabulary, --config.{option}={-(-size // parts) * parts}"
    return f"a divisor of {size}, {dimension} of {name}: choose another mesh.{axis}, or {other}"


def constrain(mesh, x, letters: str):
    """x, sharded according to its letters; x itself without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(mesh, letters, x.shape)))


def constrain_parameters(mesh, module, name: str):
    """`module` with a sharding constraint on each parameter, which applies to its gradient too.

    With the constraint, a gradient is summed and scattered in one step. Without it, the compiler first sums the whole
    gradient on every device.
    """
    if mesh is None:
        return module

    def constrained(path, variable):
        value = variable[...]
        spec = parameter_spec(mesh, variable.axes.letters, value.shape, f"{name}/{path_name(path)}")
        return variable.replace(jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec)))

    return jax.tree_util.tree_map_with_path(constrained, module, is_leaf=lambda x: isinstance(x, nnx.Variable))


def param_shardings(mesh, params, axes):
    """The NamedShardings of `params`, whose letters are the tree `axes`. Parameters and mesh may be abstract.

    Raises UserError if a mesh axis does not divide its dimension, or if an axis of PARAMETER_AXES shards no parameter.
    """

    def sharding(path, leaf, axes):
        return NamedSharding(mesh, parameter_spec(mesh, axes.letters, leaf.shape, path_name(path)))

    shardings = jax.tree_util.tree_map_with_path(sharding, params, axes)
    used = {axis for sharding in jax.tree.leaves(shardings) for axis in sharding.spec}
    for axis, dimension in PARAMETER_AXES.items():
        if mesh.shape[axis] > 1 and axis not in used:
            given = f"config.mesh.{axis}={mesh.shape[axis]}"
            raise UserError(f"{given} is not allowed: this model has no {dimension} to shard")
    return shardings


def state_shardings(mesh, state, axes):
    """Shardings of a training state; `axes` and errors as in `param_shardings`.

    An array is sharded like a parameter if its path ends in that parameter's path and it has the same shape. All others
    (counters, factored moments) are replicated.
    """
    shardings = param_shardings(mesh, state["params"], axes)
    shapes = jax.tree_util.tree_leaves_with_path(state["params"])
    known = {
        path_name(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(shapes, jax.tree.leaves(shardings), strict=True)
    }
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding_of(path, leaf):
        parts = path_name(path).split("/")
        endings = ("/".join(parts[start:]) for start in range(len(parts)))
        candidates = (known[ending] for ending in endings if ending in known)
        return next((sharding for shape, sharding in candidates if shape == leaf.shape), replicated)

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def batch_sharding(mesh) -> NamedSharding:
    """The sharding of an array [B, L] of a batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH, "context"))
