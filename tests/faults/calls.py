"""The system calls of this process below one directory: counted, recorded and made to fail (interpose.c)."""

import ctypes
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "interpose.c"


class Call(NamedTuple):
    name: str
    result: int  # 0, or the errno
    path: str
    other: str  # the second path of a rename; 'create' or 'truncate' for an open that made or emptied its file
    offset: int
    length: int
    data: bytes  # of a write

    def place(self, root: Path) -> str:
        """The call and its paths, without the numbers and the directory, which differ between runs. Orbax writes the
        items of a checkpoint (params, rest, meta) in the same way: they are one place."""
        paths = f"{self.path} {self.other}".replace(str(root), "")
        for pattern, name in ((r"[0-9a-f]{16,}", "HASH"), (r"\d[\d.]*", "N"), (r"/(params|rest|meta)\b", "/ITEM")):
            paths = re.sub(pattern, name, paths)
        return f"{self.name} {paths.strip()}"


class Recording:
    """What `watched` yields: `calls` are there after the block."""

    calls: list[Call]


def library(folder: Path) -> Path | None:
    """Compiles interpose.c into `folder`; None without a C compiler."""
    if not shutil.which("cc"):
        return None
    target = folder / "interpose.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", target, SOURCE, "-ldl"], check=True)
    return target


@contextmanager
def watched(root: Path, first: int = 0, count: int = 0, error: int = 0):
    """Records the calls below `root` in the block; calls `first` to `first + count - 1` fail with `error`."""
    shim = ctypes.CDLL(None)
    files = [root.parent / f"{root.name}.{kind}" for kind in ("trace", "data")]
    shim.faults_watch(*(str(file).encode() for file in (root, *files)), ctypes.c_long(first), ctypes.c_long(count), error)
    recording = Recording()
    try:
        yield recording
        _settle(shim)
    finally:
        shim.faults_stop()
    recording.calls = _read(*files)


def _settle(shim) -> None:
    """Waits for threads of a run that has failed: they may still write or delete."""
    before = -1
    while before != (now := shim.faults_calls()):
        before = now
        time.sleep(0.02)


def _read(trace: Path, data: Path) -> list[Call]:
    content = data.read_bytes()
    calls = []
    taken = 0
    for line in trace.read_text().splitlines():
        name, result, path, other, offset, length = line.split("\t")
        size = int(length) if name == "write" else 0
        calls.append(Call(name, int(result), path, other, int(offset), int(length), content[taken : taken + size]))
        taken += size
    return calls
