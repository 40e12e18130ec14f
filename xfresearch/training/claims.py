"""Claims on directories in a bucket, which has no locks: at most one process trains in a directory.

A process writes a small object, then lists those of others. If there is another one, either that process is alive, and this
one ends with a UserError, or it died: an object that is not renewed any more is ignored after STALE seconds. Times are
those at which the bucket stored the objects, so clocks of machines do not matter. Two processes that begin at the same time
see each other's objects, because listings of a bucket have all objects that were written before: both may end, but never
do both train. A process that could not renew its object for so long, such as one that was cut off or suspended, exits at
once, with the code of a fault that may pass: another one may train by then.
"""

import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from xfresearch.errors import TRANSIENT, UserError

RENEW, STALE = 20.0, 90.0  # seconds
PREFIX = ".claim-"


@contextmanager
def claimed(folder, renew: float = RENEW, stale: float = STALE) -> Iterator[None]:
    """Claims a directory (an epath.Path) while the `with` block runs. Waits while another process may have died there.
    Raises UserError if it is alive."""
    mine = folder / f"{PREFIX}{secrets.token_hex(6)}"
    ended = threading.Event()
    _renew(mine)
    thread = threading.Thread(target=_keep_renewing, args=(mine, renew, stale, ended), daemon=True)
    thread.start()
    try:
        _wait_for_others(folder, mine, renew, stale)
        yield
    finally:
        ended.set()
        thread.join()
        mine.unlink(missing_ok=True)


def _renew(mine) -> None:
    mine.write_text(f"{platform.node()}, process {os.getpid()}\n")


def _keep_renewing(mine, renew: float, stale: float, ended: threading.Event) -> None:
    last = time.monotonic()
    while not ended.wait(renew):
        if time.monotonic() - last > stale:
            print(f"error: {mine} is {stale:g} s old: another process may train here", file=sys.stderr, flush=True)
            os._exit(TRANSIENT)
        try:
            _renew(mine)
            last = time.monotonic()
        except Exception as error:  # whatever the bucket's library raises; the next time may succeed
            print(f"warning: {mine} could not be renewed: {error}", file=sys.stderr, flush=True)


def _wait_for_others(folder, mine, renew: float, stale: float) -> None:
    """Returns when no other process has a claim that may be renewed. Raises UserError if one was renewed."""
    first: dict[str, float] = {}
    while others := _others(folder, mine, stale):
        for name, at in others.items():
            if first.setdefault(name, at) != at and (who := _owner(folder / name)):
                raise UserError(f"--workdir={folder}: another process is training in it ({who})")
        time.sleep(renew / 4)


def _owner(claim) -> str:
    """'NODE, process ID'. Empty if the claim was removed or is being written: then the caller lists the claims again."""
    try:
        return claim.read_text().strip()
    except FileNotFoundError:
        return ""


def _others(folder, mine, stale: float) -> dict[str, float]:
    """{name: time of the last renewal} of the claims of other processes that are not stale. Stale ones are removed."""
    times = {}
    for file in folder.glob(f"{PREFIX}*"):
        try:
            times[file.name] = file.stat().mtime
        except FileNotFoundError:  # its process has just ended
            continue
    now = max(times.values(), default=0.0)  # this process has just renewed its own
    for name in [name for name, at in times.items() if now - at > stale and name != mine.name]:
        (folder / name).unlink(missing_ok=True)
        del times[name]
    times.pop(mine.name, None)
    return times
