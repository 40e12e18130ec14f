"""The machine of a run: peak FLOP/s, description and library versions. Never the name of the machine or its user."""

import importlib.util
import os
import platform
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]

# Dense bfloat16 peak in TFLOP/s per JAX device, by the start of its device_kind. The first matching row applies.
# TPU: Google's system architecture pages, per chip. A v4 and a v5p chip is one device; a v2, v3 and 7x chip is two.
# GPU: NVIDIA's data sheets, whose "with sparsity" figures are halved here.
PEAK_TFLOPS = (
    ("TPU v2", 46 / 2),
    ("TPU v3", 123 / 2),
    ("TPU v4 lite", 138),
    ("TPU v4", 275),
    ("TPU v5 lite", 197),
    ("TPU v5e", 197),
    ("TPU v5p", 459),
    ("TPU v5", 459),
    ("TPU v6 lite", 918),
    ("TPU v6e", 918),
    ("TPU7x", 2307 / 2),
    ("NVIDIA GB200", 2500),
    ("NVIDIA B200", 2250),
    ("NVIDIA GH200", 989.4),
    ("NVIDIA H200 NVL", 835.5),
    ("NVIDIA H200", 989.4),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H100 PCIe", 756.5),
    ("NVIDIA H100", 989.4),
    ("NVIDIA A100", 312),
    ("NVIDIA L40S", 362),
    ("NVIDIA L4", 121),
    ("NVIDIA A10G", 70),
    ("NVIDIA A10", 125),
)
# PCI device ids of Google that are no TPU: a disk (NVMe) and a network card (gVNIC) of Compute Engine machines. This list
# and not the one of TPUs, which grows with every version of JAX: a TPU that is newer than this file must not be missed.
NOT_TPUS = ("0x001f", "0x0042")
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "array_record"),
    "tokenizers",
    "sentencepiece",
    "numpy",
    "ml_collections",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)


def peak_flops(device_kind: str, dtype) -> float | None:
    """Peak FLOP/s of one JAX device in matrix products of `dtype`; None if it is not known (CPU, float64).

    float32 means JAX's default precision for it: one bfloat16 pass on TPU, TF32 (half the rate) on GPU.
    """
    tflops = next((peak for start, peak in PEAK_TFLOPS if _matches(device_kind, start)), None)
    name = getattr(dtype, "__name__", None) or str(dtype)
    if tflops is None or name not in ("bfloat16", "float16", "float32"):
        return None
    return tflops * 1e12 * (0.5 if name == "float32" and device_kind.startswith("NVIDIA") else 1.0)


def start_without_tpu() -> None:
    """Keeps JAX from trying libtpu on a machine without a TPU, which would log several lines of errors.

    libtpu may be installed for planning alone. Call this before JAX is imported. A JAX_PLATFORMS that is set stays as
    it is.
    """
    if "JAX_PLATFORMS" in os.environ or not importlib.util.find_spec("libtpu") or _tpu_attached():
        return
    if Path("/dev/kfd").exists():  # an AMD GPU: only JAX can tell which one
        return
    nvidia = any(Path("/dev", name).exists() for name in ("nvidia0", "nvidiactl", "dxg"))
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if nvidia and plugin else "cpu"


def _tpu_attached(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether the PCI bus has a device of Google that may be a TPU. JAX then decides; its own list is slow to import."""

    def read(path: Path) -> str:
        return path.read_text().strip()

    of_google = [path for path in devices.glob("*/vendor") if read(path) == "0x1ae0"]
    return any(read(path.with_name("device")) not in NOT_TPUS for path in of_google)


def describe_machine() -> dict:
    """Processor, memory, devices and the precision of products of float32, for run.json."""
    import jax

    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "backend": jax.default_backend(),
        "devices": kinds_of(jax.devices()),
        "processes": jax.process_count(),
        "matmul_precision": jax.config.values["jax_default_matmul_precision"] or "default",
    }


def environment() -> dict:
    """The date, machine, library versions and commit of a measurement."""
    described = {"machine": describe_machine(), "versions": versions(), "commit": git_commit()}
    return {"date": time.strftime("%Y-%m-%d")} | described


def kinds_of(devices) -> str:
    """'8 x TPU v5', for these jax.Devices."""
    kinds = [device.device_kind for device in devices]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that affect a run's numbers."""
    from importlib import metadata  # 5 ms that --help can do without

    described = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return described


def git_commit(source: Path = SOURCE) -> str:
    """The commit of the checkout at `source`, with '-dirty' if files are changed or new, other than the figures in
    docs/data, which commands write; '' if it is not a checkout.

    launch/pack.sh writes it to a file of a packed checkout.
    """
    if not (source / ".git").exists():  # an installed package may be inside some other project's checkout
        packed = source / "COMMIT"
        return packed.read_text().strip() if packed.is_file() else ""
    commit = _git(source, "rev-parse", "HEAD")
    changed = _git(source, "status", "--porcelain", "--", ".", ":(exclude)docs/data")
    return f"{commit}-dirty" if commit and changed else commit


def _git(source: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _matches(device_kind: str, start: str) -> bool:
    """Whether `device_kind` starts with the whole words of `start`: 'NVIDIA L4' does not match 'NVIDIA L40'."""
    return device_kind.startswith(start) and not device_kind[len(start) :][:1].isalnum()


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
