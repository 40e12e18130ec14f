"""Freed memory is reused: counted as page faults of a process that allocates a large buffer again and again."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from xfresearch.runtime import memory

BUFFER = 100_000_000  # bytes
ROUNDS = 10
SCRIPT = f"""
import resource, threading
import numpy as np
from xfresearch.runtime import memory
print(memory.reuse())
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    np.ones({BUFFER}, np.uint8)
    before = faults()
    for _ in range({ROUNDS}):
        np.ones({BUFFER}, np.uint8)
    print((faults() - before) / {ROUNDS})
work()
thread = threading.Thread(target=work)  # JAX computes in threads, whose memory has arenas of its own
thread.start(), thread.join()
"""
HUGE_PAGES = f"""
import numpy as np
from xfresearch.runtime import memory
memory.reuse()
kept = np.ones({BUFFER}, np.uint8)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""
ALLOWED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
may_ask = ALLOWED.exists() and "[madvise]" in ALLOWED.read_text()
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told to keep memory")


def run(script: str = SCRIPT, **variables: str) -> list[str]:
    # NumPy asks for huge pages, of which one fault makes 512 pages.
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "NUMPY_MADVISE_HUGEPAGE": "0"} | variables
    done = subprocess.run([sys.executable, "-c", script], env=variables, check=True, capture_output=True, text=True)
    return done.stdout.split()


@glibc
def test_freed_buffers_cause_no_page_faults():
    reused, *counts = run()
    assert reused == "True" and all(float(count) < 10 for count in counts)


@glibc
def test_a_variable_switches_it_off():
    reused, *counts = run(**{memory.VARIABLE: "0"})
    assert reused == "False" and all(float(count) > 0.9 * BUFFER / os.sysconf("SC_PAGE_SIZE") for count in counts)


@glibc
@pytest.mark.skipif(not may_ask, reason="here programs do not ask for huge pages: they get all or none")
def test_freed_buffers_are_in_huge_pages():
    in_huge_pages = [int(run(HUGE_PAGES, **{memory.VARIABLE: value})[0]) for value in ("1", "0")]
    assert in_huge_pages[0] > 0.9 * BUFFER / 1024 and in_huge_pages[1] < 0.1 * BUFFER / 1024


def test_a_machine_with_an_accelerator_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv(memory.VARIABLE, raising=False)
    assert not memory.reuse(tmp_path)


@glibc
def test_commands_reuse_memory(monkeypatch):
    from xfresearch.runtime import command

    called = []
    monkeypatch.setattr(command.memory, "reuse", lambda: called.append(1))
    command.run(lambda arguments: None, [])
    assert called
