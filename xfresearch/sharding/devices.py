"""Platform, kind and memory of the devices of a mesh, which may be abstract (a machine that is not here)."""

import jax
from jax.sharding import Mesh


def platform(mesh=None) -> str:
    """'cpu', 'gpu' or 'tpu': the platform of the mesh's devices, or of JAX's default device without a mesh."""
    return _device(mesh).platform


def device_kind(mesh=None) -> str:
    """JAX's name for the mesh's devices, e.g. 'TPU v6 lite', or for the default device without a mesh."""
    return _device(mesh).device_kind


def compute_capability(mesh=None) -> tuple[int, ...]:
    """The compute capability of NVIDIA GPUs, e.g. (9, 0); () for other devices or if it is not known."""
    words = str(getattr(_device(mesh), "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdecimal() for word in words) else ()  # AMD gives a name, e.g. gfx942


def memory(mesh=None) -> int:
    """The bytes that JAX may use of one GPU of this process. 0 for other devices, for a machine that is not here, and with
    several processes, whose numbers may differ while all need the same one."""
    device = _device(mesh)
    known = device.platform == "gpu" and isinstance(device, jax.Device) and jax.process_count() == 1
    return memory_of(device) if known else 0


def memory_of(device: jax.Device) -> int:
    """The bytes that JAX may use of an accelerator of this process; 0 if it does not tell."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def _device(mesh):
    """One device of a mesh, or the description of its devices in an abstract mesh."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(mesh, "abstract_device", None)
    return device or jax.devices()[0]
