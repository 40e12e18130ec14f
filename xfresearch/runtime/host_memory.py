"""The memory that this process may hold: that of the machine, of its control group (a container, a job), of `ulimit`."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
RESOURCES = {"RLIMIT_AS": "`ulimit -v` allows", "RLIMIT_DATA": "`ulimit -d` allows"}


class Limit(NamedTuple):
    bytes: int
    words: str  # 'this machine has'


def limit() -> Limit:
    """The lowest limit of this process. Swap is added to the memory of the machine and of a control group."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    swap = _sizes(Path("/proc/meminfo")).get("SwapTotal", 0)
    limits = [Limit(machine + swap, "this machine has")]
    limits += [Limit(size + swap, "the control group of this process allows") for size in control_groups()]
    for name, words in RESOURCES.items():
        size, _ = resource.getrlimit(getattr(resource, name))
        limits += [] if size == resource.RLIM_INFINITY else [Limit(size, words)]
    return min(limits)


def free() -> Limit:
    """`limit`, or what no other process of the machine holds now, if that is less and the system tells it."""
    machine, own = _sizes(Path("/proc/meminfo")), _sizes(Path("/proc/self/status"))
    most = limit()
    if "MemAvailable" not in machine:
        return most
    now = machine["MemAvailable"] + machine.get("SwapFree", 0) + own.get("VmRSS", 0)
    return min(most, Limit(now, "other processes of this machine leave"))


def control_groups(joined: Path = Path("/proc/self/cgroup"), root: Path = GROUPS) -> Iterator[int]:
    """Limits in bytes of the control groups, of version 1 and 2, that this process has joined, and of those around them. In
    a container, whose view begins at its own group, the path of that group may not exist: its limit is at the root."""
    for line in _text(joined).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            text = _text(top.joinpath(*parts[:depth], name)).strip()
            if text.isdecimal():  # or 'max'
                yield int(text)


def _sizes(path: Path) -> dict[str, int]:
    """{name: bytes} of lines 'name: number kB'."""
    rows = (line.split() for line in _text(path).splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in rows}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
