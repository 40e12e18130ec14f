"""Memory of large buffers is reused on the CPU.

An update frees a buffer of its temporaries that the next update allocates again. glibc returns buffers above 32 MiB, and the
ends of its arenas, to the system, which then hands out zeroed pages one by one: up to a third of the time of an update of a
small model (`python -m xfresearch.bench update` counts them). Here freed memory below 1 GiB stays in the process, and the
first GiB of it is in huge pages, whose addresses are translated faster.
"""

import ctypes
import mmap
import os
import sys
from pathlib import Path

VARIABLE = "XFRESEARCH_REUSE_MEMORY"
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt, in glibc's malloc.h
SETTINGS = {
    ARENA_MAX: 1,  # arenas of other threads hold at most 64 MiB, and map larger buffers whatever the threshold is
    MMAP_THRESHOLD: 1 << 30,
    TRIM_THRESHOLD: (1 << 31) - 1,  # the largest int
}
HUGE = (1 << 30) - (1 << 21)  # bytes in huge pages, below the threshold
ACCELERATORS = ("nvidia0", "nvidiactl", "dxg", "kfd", "accel0", "vfio")  # in /dev


def reuse(devices: Path = Path("/dev")) -> bool:
    """Makes malloc keep freed memory, in huge pages if the system lets programs ask for them. Returns whether it is kept.
    Call it before threads start. It changes nothing with $XFRESEARCH_REUSE_MEMORY=0, without glibc, and on a machine with an
    accelerator, unless JAX_PLATFORMS is cpu: there, buffers of updates are not the host's."""
    if os.environ.get(VARIABLE) == "0" or sys.platform != "linux":
        return False
    if os.environ.get("JAX_PLATFORMS") != "cpu" and any((devices / name).exists() for name in ACCELERATORS):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    kept = all(libc.mallopt(parameter, value) for parameter, value in SETTINGS.items())
    if kept:
        _ask_for_huge_pages(libc)
    return kept


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Makes the heap larger, which takes no memory until it is used, and marks what was added. A refusal changes nothing."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := libc.malloc(HUGE):
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(start, HUGE - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
        libc.free(block)
