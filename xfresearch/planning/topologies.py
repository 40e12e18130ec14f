"""Parses machine names: 'v5p:8x8x4', 'v5p-256' (accelerator type), '2x v5p:4x4x4' (slices), 'h100:8', 'h200:8x4'."""

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from math import prod

from xfresearch.planning.chips import CHIPS, Chip
from xfresearch.runtime.errors import UserError, nearest

# Slice shapes by number of chips: 2D for v5e and v6e, 3D for v4, v5p and tpu7x (docs.cloud.google.com/tpu/docs/v5p).
SHAPES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SHAPES_3D = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
SHAPES_3D |= {512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}
FAMILIES = {"v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e", "v5e": "v5e", "v4": "v4", "tpu7x": "tpu7x"}
EXAMPLES = "v5p:4x4x8, v5p-256, v5litepod-16, '2x v6e:16x16', h100:8 or h200:8x4 (32 GPUs)"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the plan itself runs on the CPU
    "TPU_SKIP_MDS_QUERY": "1",  # no query to the metadata server, which does not exist here
    "TPU_ACCELERATOR_TYPE": "v5e-4",  # set so that libtpu does not look it up; the topology's name overrides it
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a plan uses no TPU, so several plans may run at once
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
        """Whether the torus is closed along a dimension.

        v5e, v6e: if the dimension has 16 chips. Others: if the slice consists of whole 4x4x4 cubes, because the
        switches that close the torus connect cubes; 2x2x4 is closed in no dimension.
        """
        if self.chip.dimensions == 2:
            return self.shape[dimension] == 16
        return all(size % 4 == 0 for size in self.shape)


def parse(text: str, slices: int = 1) -> Topology:
    """The topology that `text` names. Raises UserError, with the nearest name, if there is no such machine."""
    words = re.fullmatch(r"\s*(?:(\d+)\s*x\s+)?([A-Za-z]\w*)([:-])(\d+(?:x\d+)*)\s*", text, re.ASCII)
    family = words and words[2].lower()
    if not words or family not in {*FAMILIES, *CHIPS}:
        known = [*CHIPS, *FAMILIES]
        guess = nearest(re.split(r"[:\-]", text.split()[-1] if text.split() else "")[0].lower(), known)
        raise UserError(f"--topology={text} is not allowed: there is no such machine{guess} (examples: {EXAMPLES})")
    slices = slices * int(words[1] or 1)
    family = FAMILIES.get(family, family)
    sizes = tuple(int(size) for size in words[4].split("x"))
    if min(sizes) < 1 or slices < 1:
        raise UserError(f"--topology={text} is not allowed: every size must be at least 1 (examples: {EXAMPLES})")
    if CHIPS[family].switched:
        return _hosts(text, family, sizes, slices)
    return _slice(text, family, sizes if words[3] == ":" else _accelerator_type(text, family, sizes), slices)


def _hosts(text: str, family: str, sizes: tuple, slices: int) -> Topology:
    if len(sizes) > 2 or sizes[0] > CHIPS[family].host:
        raise UserError(
            f"--topology={text} is not allowed: it must be {family}:GPUS or {family}:GPUSxHOSTS, "
            f"at most {CHIPS[family].host} GPUs per host"
        )
    return Topology(family, sizes[:1], slices * (sizes[1] if len(sizes) == 2 else 1))


def _accelerator_type(text: str, family: str, sizes: tuple) -> tuple:
    """The shape of an accelerator type: v5p-256 has 256 TensorCores, two per chip; v6e-256 has 256 chips."""
    table = SHAPES_2D if CHIPS[family].dimensions == 2 else SHAPES_3D
    cores = CHIPS[family].cores
    if len(sizes) != 1 or sizes[0] % cores or sizes[0] // cores not in table:
        allowed = ", ".join(f"{family}-{chips * cores}" for chips in table)
        shape = f"{family}:8x8" if table is SHAPES_2D else f"{family}:4x4x12"
        raise UserError(
            f"--topology={text} is not allowed: it must be one of {allowed}; name other slices by shape, e.g. {shape}"
        )
    return tuple(map(int, table[sizes[0] // cores].split("x")))


def _slice(text: str, family: str, shape: tuple, slices: int) -> Topology:
    dimensions = CHIPS[family].dimensions
    example = f"{family}:{(SHAPES_2D if dimensions == 2 else SHAPES_3D)[16]}"
    if len(shape) != dimensions:
        raise UserError(
            f"--topology={text} is not allowed: a {family} slice must have {dimensions} dimensions, e.g. {example}"
        )
    if set(shape) != {1} and (shape[0] % 2 or shape[1] % 2):  # a host holds 2 x 2 chips
        raise UserError(
            f"--topology={text} is not allowed: the first two sizes must be even, e.g. {example}, or all sizes 1"
        )
    if dimensions == 2 and max(shape) > 16:
        raise UserError(
            f"--topology={text} is not allowed: a {family} slice has at most 16x16 chips; "
            f"use more slices, e.g. '2x {example}'"
        )
    return Topology(family, shape, slices)


def set_environment() -> None:
    """Sets the variables that libtpu needs to compile without a TPU. Call it before JAX is imported."""
    os.environ.update(ENVIRONMENT)


def libtpu_installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@dataclass(frozen=True)
class Gpu:
    """A GPU that this machine does not have, with the attributes that a mesh reads from a device."""

    id: int
    slice_index: int  # its host; JAX gives hosts this number if their GPUs have no faster network between them
    device_kind: str
    compute_capability: str
    platform: str = "gpu"
    process_index: int = 0


def gpus(topology: Topology) -> list[Gpu]:
    """Stand-ins for the topology's GPUs, to build a mesh from."""
    chip = topology.chip
    return [Gpu(i, i // topology.shape[0], chip.kind, chip.compute_capability) for i in range(topology.devices)]


def tpu_devices(topology: Topology) -> list:
    """The topology's devices, to compile for without a TPU.

    Raises UserError if libtpu is missing or rejects the topology.
    """
    if not libtpu_installed():
        raise UserError(
            f"--topology={topology.name} needs libtpu, the TPU compiler, which runs on any Linux machine: "
            "pip install 'xfresearch[tpu]', or in a checkout -r requirements/tpu.txt"
        )
    from jax.experimental import topologies

    wraps = [topology.wraps(i) for i in range(len(topology.shape))]
    options: dict = {"wrap": tuple([*wraps, False][:3])}  # libtpu needs three values, even for a 2D slice
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.family == "v4":
        options["chip_config_name"] = "megacore"  # the two cores of a chip form one device
    if set(topology.shape) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = replace(topology, slices=1).name
    try:
        return topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices
    except Exception as error:
        raise UserError(f"--topology={topology.name}: error in libtpu: {str(error).splitlines()[0][:200]}") from error
