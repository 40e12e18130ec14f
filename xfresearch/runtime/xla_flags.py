"""Flags of XLA and NCCL for the accelerators of this machine: the one table of them, set before JAX starts.

What the user has set in XLA_FLAGS, LIBTPU_INIT_ARGS or a variable of NCCL stays. A flag that the installed jaxlib or libtpu
does not have is left out with a warning: XLA would abort. docs/sharding.md shows the table (python -m docs.write).
"""

import importlib.util
import mmap
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

XLA, LIBTPU = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
NVIDIA = 'NVIDIA JAX-Toolbox, "Environment Variables" of its images, 2026'
A3 = "MaxText, configs/gpu/a3/llama_2_7b/2vm.sh, 2026-08-22"
TPU = "MaxText, benchmarks/xla_flags_library.py, 2026-08-22"
JAX = 'JAX, "GPU performance tips", 2026'
GPUS = ("GPUs",)  # several in this machine: one GPU has no collectives
FUSING = ("v5e", "v5p", "v6e")  # tpu7x has its collectives in SparseCores by default
# Chips of Google by their PCI device ids, as in jax/_src/hardware_utils.py.
TPUS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}


class Flag(NamedTuple):
    """A line of the table."""

    variable: str  # XLA_FLAGS, LIBTPU_INIT_ARGS, or a variable of its own
    name: str  # of the flag; '' for a variable of its own
    value: str
    chips: tuple[str, ...]
    purpose: str
    source: str
    measured: str = "not measured"

    @property
    def text(self) -> str:
        return f"--{self.name}={self.value}" if self.name else f"{self.variable}={self.value}"


TABLE = (
    Flag(XLA, "xla_gpu_enable_latency_hiding_scheduler", "true", GPUS, "moves collectives beside computation", NVIDIA),
    *(
        Flag(XLA, f"xla_gpu_{kind}_combine_threshold_bytes", size, GPUS, "joins collectives up to this size into one", A3)
        for kind, size in (("all_reduce", "67108864"), ("all_gather", "134217728"), ("reduce_scatter", "67108864"))
    ),
    *(
        Flag(XLA, f"xla_gpu_enable_pipelined_{kind}", "true", GPUS, "moves collectives of a scan into the next layer", A3)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ),
    Flag("NCCL_LL128_BUFFSIZE", "", "-2", GPUS, "larger buffers between GPUs of a machine", JAX),
    Flag("NCCL_LL_BUFFSIZE", "", "-2", GPUS, "larger buffers between GPUs of a machine", JAX),
    Flag("NCCL_PROTO", "", "SIMPLE,LL,LL128", GPUS, "protocols that NCCL may choose from", JAX),
    Flag(LIBTPU, "xla_tpu_scoped_vmem_limit_kib", "98304", ("v6e",), "more VMEM for an operation than for prefetching", TPU),
    *(
        Flag(LIBTPU, name, "true", FUSING, "splits all-gathers and runs them beside products", TPU)
        for name in (
            "xla_tpu_enable_async_collective_fusion",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
            "xla_tpu_enable_async_collective_fusion_multiple_steps",
            "xla_tpu_overlap_compute_collective_tc",
            "xla_enable_async_all_gather",
        )
    ),
)

_given: dict[str, str] = {}  # the variables as the user had set them
_set: list[Flag] = []


def given(variable: str) -> str:
    """The value of a variable as the user had set it. Ours follow from the devices and the code."""
    return _given.get(variable, os.environ.get(variable, ""))


def chips(devices: Path = Path("/dev"), bus: Path = Path("/sys/bus/pci/devices")) -> str:
    """The kind of this machine's accelerators in the table; '' for none, one GPU, and kinds that the table does not have."""
    found = {path.with_name("device").read_text().strip() for path in bus.glob("*/vendor") if _of_google(path)}
    tpu = next((TPUS[name] for name in sorted(found) if name in TPUS), "")
    gpus = [path for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()]
    return tpu or (GPUS[0] if len(gpus) > 1 else "")


def _of_google(vendor: Path) -> bool:
    return vendor.read_text().strip() == "0x1ae0"


def set_flags(kind: str | None = None) -> None:
    """Sets the flags of the table for this machine's accelerators, or for a `kind`. Call it before JAX starts."""
    kind = chips() if kind is None else kind
    if _given or not kind or os.environ.get("JAX_PLATFORMS") == "cpu":
        return
    rows = [row for row in TABLE if kind in row.chips]
    _given.update({row.variable: os.environ.get(row.variable, "") for row in rows})
    wanted = [row for row in rows if not _is_given(row)]
    missing = unknown_to_xla([row for row in wanted if row.variable == XLA])
    missing |= unknown_to_libtpu([row for row in wanted if row.variable == LIBTPU])
    if missing:
        names = ", ".join(sorted(missing))
        print(f"warning: these flags are left out, because the installed version lacks them: {names}", file=sys.stderr)
    _set.extend(row for row in wanted if row.name not in missing or not row.name)
    for row in _set:
        before = os.environ.get(row.variable, "")
        os.environ[row.variable] = f"{before} {row.text}".strip() if row.name else row.value


def described() -> str:
    """What was set, in one line; '' for nothing."""
    return " ".join(row.text for row in _set)


def _is_given(row: Flag) -> bool:
    value = given(row.variable)
    if not row.name:
        return bool(value)
    return row.name in {word.lstrip("-").partition("=")[0] for word in shlex.split(value)}


def unknown_to_xla(rows: Iterable[Flag]) -> set[str]:
    """The names of flags that the installed jaxlib does not have. XLA aborts at such a flag, so another process tries them.
    If that process fails for another reason, all names are returned."""
    flags = " ".join(row.text for row in rows)
    if not flags:
        return set()
    command = [sys.executable, "-c", "from jaxlib import _jax; _jax.CompileOptions()"]
    done = subprocess.run(command, env=os.environ | {XLA: flags}, capture_output=True, text=True)
    if done.returncode == 0:
        return set()
    named = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", done.stderr)
    return {name for name, *_ in (word.lstrip("-").split("=") for word in (named[1] if named else flags).split())}


def unknown_to_libtpu(rows: Iterable[Flag], library: Path | None = None) -> set[str]:
    """The names of flags that the installed libtpu does not have: its file contains the names of its flags as text."""
    names = {row.name for row in rows}
    spec = importlib.util.find_spec("libtpu") if names and library is None else None
    library = library or (Path(spec.origin).with_name("libtpu.so") if spec and spec.origin else None)
    if not names or library is None or not library.is_file():
        return names
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name for name in names if not _has_word(content, name.encode())}


def _has_word(content: mmap.mmap, word: bytes) -> bool:
    """Whether a file has `word` with no letter, digit or underscore beside it. `re` alone would take seconds for libtpu."""
    at = content.find(word)
    while at >= 0:
        if not re.search(rb"\w", content[max(at - 1, 0) : at] + content[at + len(word) : at + len(word) + 1]):
            return True
        at = content.find(word, at + 1)
    return False
