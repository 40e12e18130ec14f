"""Claims on directories in a bucket, which has no locks: at most one process trains in a directory.

A process writes a small object, then lists those of others. If there is another one, either that process is alive, and this
one ends with a UserError, or it died: an object that is not renewed any more is ignored after STALE seconds. Times are
those at which the bucket stored the objects, so clocks of machines do not matter. Two processes that begin at the same time
see each other's objects, because listings of a bucket have all objects that were written before: both may end, but never
do both train. A process that was cut off and could not renew its object exits with the code of a fault that may pass,
before others may ignore the object; one that was suspended does so when it wakes. Another thread watches the age of the
object, so a write that hangs does not delay this.
"""

import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from xfresearch.runtime.errors import TRANSIENT, UserError
from xfresearch.runtime.files import names_in, read_bytes, remove, write_object

RENEW, STALE = 20.0, 90.0  # seconds
PREFIX = ".claim-"


class Busy(UserError):
    """Another process trains in a directory."""


@contextmanager
def claimed(folder, renew: float = RENEW, stale: float = STALE) -> Iterator[None]:
    """Claims a directory (an epath.Path) while the `with` block runs. Waits while another process may have died there.
    Raises Busy if it is alive."""
    claim = _Claim(folder / f"{PREFIX}{secrets.token_hex(6)}", renew, stale)
    renewing = threading.Thread(target=claim.keep_renewing, daemon=True)
    renewing.start()
    threading.Thread(target=claim.watch, daemon=True).start()
    try:
        _wait_for_others(folder, claim.file, renew, stale)
        yield
    finally:
        claim.ended.set()
        renewing.join()
        claim.released.set()
        remove(claim.file)


class _Claim:
    """The claim of this process. It is renewed every `renew` seconds, and others may ignore it after `stale` seconds."""

    def __init__(self, file, renew: float, stale: float):
        self.file, self.renew, self.stale = file, renew, stale
        self.ended, self.released = threading.Event(), threading.Event()
        self.write()

    def write(self) -> None:
        began = _now()  # the bucket stores the object later, so others think the claim younger than this process does
        write_object(self.file, f"{platform.node()}, process {os.getpid()}\n".encode())
        self.renewed = began

    def keep_renewing(self) -> None:
        while not self.ended.wait(self.renew):
            self.end_if_old()  # the machine may have been suspended: then another process may have taken the directory
            try:
                self.write()
            except Exception as error:  # whatever the bucket's library raises; the next time may succeed
                print(f"warning: {self.file} could not be renewed: {error}", file=sys.stderr, flush=True)

    def watch(self) -> None:
        while not self.released.wait(self.renew / 4):
            self.end_if_old()

    def end_if_old(self) -> None:
        """Ends the process if the claim was not renewed for so long that others may soon ignore it."""
        age = _now() - self.renewed
        if age > self.stale - self.renew:
            print(f"error: {self.file} is {age:.0f} s old: another process may train here", file=sys.stderr, flush=True)
            os._exit(TRANSIENT)


def _now() -> float:
    """Seconds of a clock that, where there is one, also counts the time when the machine was suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _wait_for_others(folder, mine, renew: float, stale: float) -> None:
    """Returns when no other process has a claim that may be renewed. Raises Busy if one was renewed."""
    first: dict[str, float] = {}
    while others := _others(folder, mine, stale):
        for name, at in others.items():
            if first.setdefault(name, at) != at and (who := _owner(folder / name)):
                raise Busy(f"--workdir={folder}: another process is training in it ({who})")
        time.sleep(renew / 4)


def _owner(claim) -> str:
    """'NODE, process ID'. Empty if the claim was removed or is being written: then the caller lists the claims again."""
    try:
        return read_bytes(claim).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _others(folder, mine, stale: float) -> dict[str, float]:
    """{name: time of the last renewal} of the claims of other processes that are not stale. Stale ones are removed."""
    times = {}
    for name in names_in(folder, f"{PREFIX}*"):
        try:
            times[name] = (folder / name).stat().mtime
        except FileNotFoundError:  # its process has just ended
            continue
    now = max(times.values(), default=0.0)  # this process has just renewed its own
    for name in [name for name, at in times.items() if now - at > stale and name != mine.name]:
        remove(folder / name)
        del times[name]
    times.pop(mine.name, None)
    return times
