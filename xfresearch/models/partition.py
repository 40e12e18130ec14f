"""Where arrays lie on a mesh: the PartitionSpecs that models/axes.py's tables give for dimensions with letters.

A model without a mesh is on one device, or lets the compiler decide.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xfresearch.errors import UserError
from xfresearch.models.axes import CUTS, axes_of, path_name


def parameter_spec(mesh, letters: str, shape: tuple, name: str) -> PartitionSpec:
    """How the parameter `name` is cut; errors as of `_spec`."""
    return _spec(mesh, letters, shape, f"parameter {name}", 0)


def activation_spec(mesh, letters: str, shape: tuple) -> PartitionSpec:
    """How an activation is cut; errors as of `_spec`."""
    return _spec(mesh, letters, shape, f"activation {letters}", 1)


def _spec(mesh, letters: str, shape: tuple, name: str, column: int) -> PartitionSpec:
    """UserError for a dimension that its axes do not divide; ValueError where one axis cuts two of them."""
    # One key-value head (multi-query) is every device's: there is nothing to cut.
    cuts = [() if (letter, size) == ("G", 1) else CUTS[letter][column]
            for letter, size in zip(letters, shape, strict=True)]  # fmt: skip
    used = [axis for axes in cuts for axis in axes]
    if len(used) != len(set(used)):
        raise ValueError(f"{name} {shape}: two of its dimensions are cut by one mesh axis: {cuts}")
    for axes, size in zip(cuts, shape, strict=True):
        for axis in axes:
            if size % mesh.shape[axis]:
                raise UserError(
                    f"config.mesh.{axis}={mesh.shape[axis]} does not divide {size}, a dimension of {name} {shape}"
                )
            size //= mesh.shape[axis]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in cuts))


def constrain(mesh, x, letters: str):
    """x, laid over `mesh` as its letters say; x itself without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(mesh, letters, x.shape)))


def lay_layer(mesh, layer, stack: str):
    """One layer of `stack`, its parameters laid over the mesh as the stack's are, and so are their gradients: said here, a
    gradient is summed and scattered in one step; left to the compiler, it is summed whole on every device first."""
    if mesh is None:
        return layer

    def lay(path, leaf):
        name = f"blocks/{stack}/{path_name(path[:-1])}"  # the last key is nnx's own
        letters = axes_of(name, leaf.ndim + 1).letters[1:]
        return jax.lax.with_sharding_constraint(
            leaf, NamedSharding(mesh, parameter_spec(mesh, letters, leaf.shape, name))
        )

    return jax.tree_util.tree_map_with_path(lay, layer)


def platform(mesh=None) -> str:
    """'cpu', 'gpu' or 'tpu': that of the mesh's devices, which may be of a machine that is not here; otherwise JAX's own."""
    return _device(mesh).platform


def device_kind(mesh=None) -> str:
    """What JAX calls the mesh's devices, e.g. 'TPU v6 lite'; otherwise those that are here."""
    return _device(mesh).device_kind


def compute_capability(mesh=None) -> tuple[int, ...]:
    """That of the mesh's devices where they are NVIDIA GPUs, e.g. (9, 0); () of all others, and of GPUs not known closer."""
    words = str(getattr(_device(mesh), "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdecimal() for word in words) else ()  # AMD's are words, as gfx942


def _device(mesh):
    """One of the mesh's devices, or what an abstract mesh says of them; otherwise one that is here."""
    there = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(mesh, "abstract_device", None)
    return there or jax.devices()[0]
