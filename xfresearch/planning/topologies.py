"""Names of machines: 'v5p:8x8x4', 'v5p-256' (Google's accelerator type), '2x v5p:4x4x4' (slices), 'h100:8', 'h200:8x4'."""

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from math import prod

from xfresearch.errors import UserError, nearest
from xfresearch.planning.chips import CHIPS, Chip

# Shapes by number of chips: 2D ones of v5e and v6e, 3D ones of v4, v5p and tpu7x (docs.cloud.google.com/tpu/docs/v5p).
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SOLID = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
SOLID |= {512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}
FAMILIES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "v5e": "v5e", "v4": "v4", "tpu7x": "tpu7x"}
EXAMPLES = "v5p:4x4x8, v5p-256, v5litepod-16, '2x v6e:16x16', h100:8 or h200:8x4 (32 GPUs)"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the plan itself runs on the CPU
    "TPU_SKIP_MDS_QUERY": "1",  # no question to a metadata server that is not there
    "TPU_ACCELERATOR_TYPE": "v5e-4",  # said so that libtpu does not look for it; the topology's name is what counts
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a plan holds no TPU, so that several may run at once
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Topology:
    family: str  # a key of CHIPS
    shape: tuple[int, ...]  # chips of one slice along each dimension of the torus; GPUs per host
    slices: int = 1  # slices or hosts

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]

    @property
    def tpu(self) -> bool:
        return not self.chip.switched

    @property
    def chips(self) -> int:
        return prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def name(self) -> str:
        sizes = "x".join(map(str, self.shape))
        if not self.tpu:
            return f"{self.family}:{sizes}" + (f"x{self.slices}" if self.slices > 1 else "")
        return (f"{self.slices}x " if self.slices > 1 else "") + f"{self.family}:{sizes}"

    def wraps(self, dimension: int) -> bool:
        """Whether the torus is closed along a dimension: of v5e and v6e one of 16 chips, of the others each, where the slice
        is made of whole cubes of 4x4x4 (2x2x4 is closed nowhere): the switches that close it lie between cubes."""
        if self.chip.dimensions == 2:
            return self.shape[dimension] == 16
        return all(size % 4 == 0 for size in self.shape)


def parse(text: str, slices: int = 1) -> Topology:
    """The topology that `text` names; UserError, with the nearest name, where there is none."""
    words = re.fullmatch(r"\s*(?:(\d+)\s*x\s+)?([A-Za-z]\w*)([:-])(\d+(?:x\d+)*)\s*", text, re.ASCII)
    family = words and words[2].lower()
    if not words or family not in {*FAMILIES, *CHIPS}:
        known = [*CHIPS, *FAMILIES]
        guess = nearest(re.split(r"[:\-]", text.split()[-1] if text.split() else "")[0].lower(), known)
        raise UserError(f"--topology={text}: there is no such machine{guess} (examples: {EXAMPLES})")
    slices = slices * int(words[1] or 1)
    family = FAMILIES.get(family, family)
    sizes = tuple(int(size) for size in words[4].split("x"))
    if min(sizes) < 1 or slices < 1:
        raise UserError(f"--topology={text}: sizes are at least 1 (examples: {EXAMPLES})")
    if CHIPS[family].switched:
        return _hosts(text, family, sizes, slices)
    return _slice(text, family, sizes if words[3] == ":" else _accelerator_type(text, family, sizes), slices)


def _hosts(text: str, family: str, sizes: tuple, slices: int) -> Topology:
    if len(sizes) > 2 or sizes[0] > CHIPS[family].host:
        raise UserError(f"--topology={text}: GPUs are named GPUSxHOSTS, at most {CHIPS[family].host} GPUs per host")
    return Topology(family, sizes[:1], slices * (sizes[1] if len(sizes) == 2 else 1))


def _accelerator_type(text: str, family: str, sizes: tuple) -> tuple:
    """v5p-256 is 256 TensorCores, two a chip; v6e-256 is 256 chips."""
    table = FLAT if CHIPS[family].dimensions == 2 else SOLID
    cores = CHIPS[family].cores
    if len(sizes) != 1 or sizes[0] % cores or sizes[0] // cores not in table:
        allowed = ", ".join(f"{family}-{chips * cores}" for chips in table)
        shape = f"{family}:8x8" if table is FLAT else f"{family}:4x4x12"
        raise UserError(f"--topology={text}: it is none of {allowed}; name other slices by their shape, as {shape}")
    return tuple(map(int, table[sizes[0] // cores].split("x")))


def _slice(text: str, family: str, shape: tuple, slices: int) -> Topology:
    dimensions = CHIPS[family].dimensions
    example = f"{family}:{(FLAT if dimensions == 2 else SOLID)[16]}"
    if len(shape) != dimensions:
        raise UserError(f"--topology={text}: a {family} slice has {dimensions} dimensions, as {example}")
    if set(shape) != {1} and (shape[0] % 2 or shape[1] % 2):  # a host holds 2 x 2 chips
        raise UserError(f"--topology={text}: the first two sizes must be even, as {example}, or all of them 1")
    if dimensions == 2 and max(shape) > 16:
        raise UserError(
            f"--topology={text}: a {family} slice has at most 16x16 chips; name more slices, as '2x {example}'"
        )
    return Topology(family, shape, slices)


def set_environment() -> None:
    """What libtpu reads when it is loaded to compile, not to run; to be called before JAX is imported."""
    os.environ.update(ENVIRONMENT)


def libtpu_installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@dataclass(frozen=True)
class Gpu:
    """What a mesh asks of a device, of a GPU that is not here."""

    id: int
    slice_index: int  # its host, as JAX numbers those whose GPUs have no faster network between them
    device_kind: str
    compute_capability: str
    platform: str = "gpu"
    process_index: int = 0


def gpus(topology: Topology) -> list[Gpu]:
    """GPUs of the topology to lay a mesh over, without any being there."""
    chip = topology.chip
    return [Gpu(i, i // topology.shape[0], chip.kind, chip.compute_capability) for i in range(topology.devices)]


def tpu_devices(topology: Topology) -> list:
    """Devices of the topology to compile for, without any being there; UserError where libtpu is missing or refuses."""
    if not libtpu_installed():
        raise UserError(
            f"--topology={topology.name} needs libtpu, the compiler for TPUs, which runs on any Linux machine: "
            "python -m pip install -r requirements-plan.txt"
        )
    from jax.experimental import topologies

    wraps = [topology.wraps(i) for i in range(len(topology.shape))]
    options = {"wrap": tuple([*wraps, False][:3])}  # libtpu wants three, also of a flat slice
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.family == "v4":
        options["chip_config_name"] = "megacore"  # two cores of a chip are one device
    if set(topology.shape) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = replace(topology, slices=1).name
    try:
        return topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices
    except Exception as error:
        raise UserError(f"--topology={topology.name}: libtpu says {str(error).splitlines()[0][:200]}") from error
