"""Which process makes which shard of a folder that hosts share, or of a bucket: neither needs locks.

Each process keeps a small file that names the shards that it makes, and renews it. Others leave these shards to it until the
file is STALE, by the times that the disk or bucket gave to the files, or until they see that its process has died on their
own machine. Nothing but time is lost if two processes make the same shard: they write the same bytes, and each file appears
whole.
"""

import json
import os
import platform
import secrets
import threading
from contextlib import suppress

from xfresearch.runtime.files import inside, make_directory, names_in, read_bytes, remove, write_text

RENEW, STALE = 10.0, 60.0  # seconds
POLL = 0.5  # seconds between two looks at what others have made


class Writers:
    """The processes that make shards of a folder, of which this is one until `close`."""

    def __init__(self, folder, renew: float = RENEW, stale: float = STALE):
        self._folder, self._stale = inside(folder, "writers"), stale
        make_directory(self._folder)
        self._own: set[int] = set()
        self._lock = threading.Lock()
        self._file = inside(self._folder, f"{secrets.token_hex(8)}.json")
        self._write()
        self._ended = threading.Event()
        threading.Thread(target=self._keep_renewing, args=[renew], daemon=True).start()

    def take(self, number: int) -> bool:
        """Whether this process may make a shard: it is then named as its writer."""
        if number in self.others():
            return False
        with self._lock:
            self._own.add(number)
            self._write()
        if self.others().get(number, "~") < self._file.name:  # both have taken it at the same time
            self.leave(number)
            return False
        return True

    def leave(self, number: int) -> None:
        with self._lock:
            self._own.discard(number)
            self._write()

    def others(self) -> dict[int, str]:
        """The shards that other processes make, and the names of their files."""
        known = {name: entry for name in names_in(self._folder, "*.json") if (entry := self._entry(name))}
        newest = max((at for at, _ in known.values()), default=0.0)
        known.pop(self._file.name, None)
        found: dict[int, str] = {}
        for name, (at, content) in known.items():
            if newest - at > self._stale or _has_died(content):
                remove(inside(self._folder, name))
            else:
                found |= {number: name for number in content["shards"]}
        return found

    def wait(self) -> None:
        """Waits a moment for the others."""
        self._ended.wait(POLL)

    def close(self) -> None:
        self._ended.set()
        with self._lock, suppress(OSError):
            remove(self._file)

    def _entry(self, name: str) -> tuple[float, dict] | None:
        path = inside(self._folder, name)
        try:
            return float(getattr(path.stat(), "mtime", 0.0)), json.loads(read_bytes(path))
        except (FileNotFoundError, ValueError):  # it has just ended, or is being written
            return None

    def _write(self) -> None:
        content = {"host": platform.node(), "process": os.getpid(), "shards": sorted(self._own)}
        write_text(self._file, json.dumps(content) + "\n")

    def _keep_renewing(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            with self._lock, suppress(OSError):  # the next time may succeed, and at worst another makes the shard, too
                if not self._ended.is_set():
                    self._write()


def _has_died(content: dict) -> bool:
    if content["host"] != platform.node():
        return False
    try:
        os.kill(content["process"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
