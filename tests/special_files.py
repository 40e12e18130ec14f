"""Files that are no regular files, and links, to put where a path enters."""

import contextlib
import faulthandler
import os
import signal
import socket
from pathlib import Path


def make(kind: str, path: Path) -> None:
    """Puts a special file at `path`, in place of what is there."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # a whole path may be too long
            server.bind(path.name)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "nothing"}[kind])


def remove(path: Path) -> None:
    path.rmdir() if path.is_dir() else path.unlink()


KINDS = ("pipe", "socket", "directory", "device", "loop", "dangling")


@contextlib.contextmanager
def at_most(seconds: int):
    """Ends the test if the block waits longer; all tests, with the place, if a library waits that no signal reaches."""

    def late(*_):
        raise TimeoutError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
