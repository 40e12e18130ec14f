"""What the devices of a mesh are, also of a mesh whose machine is not here."""

import jax
from jax.sharding import Mesh


def platform(mesh=None) -> str:
    """'cpu', 'gpu' or 'tpu': the platform of the mesh's devices, or JAX's default without a mesh."""
    return _device(mesh).platform


def device_kind(mesh=None) -> str:
    """JAX's name for the mesh's devices, e.g. 'TPU v6 lite', or for the default device without a mesh."""
    return _device(mesh).device_kind


def compute_capability(mesh=None) -> tuple[int, ...]:
    """The compute capability of NVIDIA GPUs, e.g. (9, 0); () for other devices, and where it is not known."""
    words = str(getattr(_device(mesh), "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdecimal() for word in words) else ()  # AMD's are words, as gfx942


def _device(mesh):
    """One device of a mesh, or the description that an abstract mesh has of its devices."""
    described = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(mesh, "abstract_device", None)
    return described or jax.devices()[0]
