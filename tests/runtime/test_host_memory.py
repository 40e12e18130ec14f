"""The memory that a process may hold: the lowest of several limits."""

import resource

import pytest

from xfresearch.runtime import host_memory
from xfresearch.runtime.host_memory import control_groups, limit


def write(path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize(
    ("joined", "files", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": "3000", "job/step/memory.max": "max", "memory.max": "9000"}, [9000, 3000]),
        ("0::/of/the/host\n", {"memory.max": "5000"}, [5000]),  # in a container
        ("7:cpu:/a\n4:memory:/a/b\n0::/\n", {"memory/a/b/memory.limit_in_bytes": "2000"}, [2000]),
        ("3:cpuacct,memory:/\n", {"memory/memory.limit_in_bytes": "4000"}, [4000]),
        ("0::/../x\n", {}, []),
        ("", {}, []),
    ],
)
def test_limits_of_control_groups(tmp_path, joined, files, expected):
    write(tmp_path / "cgroup", joined)
    for name, content in files.items():
        write(tmp_path / "groups" / name, content + "\n")
    assert list(control_groups(tmp_path / "cgroup", tmp_path / "groups")) == expected


def test_the_lowest_limit_counts(monkeypatch):
    monkeypatch.setattr(host_memory, "control_groups", lambda: iter(()))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    machine = limit()
    assert machine.words == "this machine has" and machine.bytes > 1 << 28
    monkeypatch.setattr(host_memory, "control_groups", lambda: iter((1 << 50, 20_000)))
    assert "control group" in limit().words and limit().bytes < machine.bytes + 20_000
    low = {resource.RLIMIT_AS: 1000, resource.RLIMIT_DATA: 900}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (low[which], resource.RLIM_INFINITY))
    assert limit() == (900, "`ulimit -d` allows") and host_memory.free() == limit()


def test_other_processes_leave_less_than_the_machine_has(monkeypatch):
    sizes = {"MemAvailable": 1 << 20, "VmRSS": 1 << 10}
    monkeypatch.setattr(host_memory, "_sizes", lambda path: sizes)
    assert host_memory.free() == ((1 << 20) + (1 << 10), "other processes of this machine leave")
    monkeypatch.setattr(host_memory, "_sizes", lambda path: {})  # a system that does not tell
    assert host_memory.free() == limit()
