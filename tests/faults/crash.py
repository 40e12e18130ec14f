"""Directories as a crash of the machine may leave them, rebuilt from the recorded system calls of a run.

A file system may lose everything that was not synced. Two ways to lose it are tried at every point:

    content   names (created, renamed, removed files) are on the disk, written bytes only up to the last fsync of their
              file: a renamed file may be empty
    names     as `content`, and names are as they were at the last fsync of any file or directory

Journaling file systems write names in order, and any fsync writes all names before it.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.faults.calls import Call

CHANGES = {"mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat"}


class Disk:
    """Names and contents below one directory."""

    def __init__(self, root: Path):
        self.names: dict[str, int | None] = {}  # path -> number of its file; None: a directory
        self.written: list[bytearray] = []  # by file number
        self.synced: list[bytes] = []
        for path in sorted(root.rglob("*")):
            self.names[str(path)] = None if path.is_dir() else self._new(path.read_bytes())

    def _new(self, content: bytes) -> int:
        self.written.append(bytearray(content))
        self.synced.append(content)
        return len(self.written) - 1

    def apply(self, call: Call) -> bool:
        """Makes the change of `call`. Whether it synced something."""
        if call.name == "open" and call.other == "create":
            self.names[call.path] = self._new(b"")
        elif call.name == "open" and call.other == "truncate":
            self.written[self.names[call.path]] = bytearray()
        elif call.name in ("truncate", "truncate64", "ftruncate", "ftruncate64"):
            content = self.written[self.names[call.path]]
            self.written[self.names[call.path]] = content[: call.length].ljust(call.length, b"\0")
        elif call.name == "write":
            content = self.written[self.names[call.path]]
            content[len(content) :] = bytes(max(call.offset - len(content), 0))
            content[call.offset : call.offset + call.length] = call.data
        elif call.name in ("fsync", "fdatasync"):
            number = self.names[call.path]
            if number is not None:
                self.synced[number] = bytes(self.written[number])
            return True
        elif call.name in ("mkdir", "mkdirat"):
            self.names[call.path] = None
        elif call.name in ("rmdir", "unlink", "unlinkat"):
            del self.names[call.path]
        elif call.name in ("link", "linkat"):
            self.names[call.other] = self.names[call.path]
        elif call.name in ("rename", "renameat", "renameat2"):
            self._rename(call.path, call.other)
        return False

    def _rename(self, old: str, new: str) -> None:
        moved = {path: number for path, number in self.names.items() if path == old or path.startswith(old + "/")}
        for path in moved:
            del self.names[path]
        self.names |= {new + path[len(old) :]: number for path, number in moved.items()}

    def state(self, names: dict[str, int | None]) -> dict[str, bytes | None]:
        """{path: synced content, or None for a directory}"""
        return {path: None if number is None else self.synced[number] for path, number in names.items()}


def states(root: Path, calls: list[Call]) -> Iterator[tuple[int, str, dict]]:
    """(number of calls made, 'content' or 'names', state) of every distinct directory that a crash may leave. `root` is
    as it was before the calls."""
    disk = Disk(root)
    durable = dict(disk.names)
    seen = set()
    for number, call in enumerate(calls, start=1):
        if call.result or (call.name != "write" and not disk_changes(call)):
            continue
        if disk.apply(call):
            durable = dict(disk.names)
        for way, names in (("content", disk.names), ("names", durable)):
            state = disk.state(names)
            key = hash(frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                yield number, way, state


def disk_changes(call: Call) -> bool:
    """Whether `call` may change or sync the disk."""
    return call.name in CHANGES or call.name in ("open", "fsync", "fdatasync") or "truncate" in call.name


def rebuild(state: dict[str, bytes | None]) -> None:
    """Makes the files and directories of `state`."""
    for path, content in sorted(state.items()):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(exist_ok=True) if content is None else Path(path).write_bytes(content)
