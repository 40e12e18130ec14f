"""The one way to open a file that somebody else may have written.

Its kind is asked of the open file, so that no other file can take its place before it is read. Nothing but a regular file
is read: a pipe or a socket would be waited for, and a device may have no end. tests/test_gate.py lists the files that are
opened elsewhere.
"""

import errno
import io
import os
import stat
from typing import cast

from xfresearch.runtime.errors import UserError

_FLAGS = os.O_NONBLOCK | os.O_NOCTTY if os.name == "posix" else 0  # a pipe is opened at once, and is then refused


def in_bucket(path) -> bool:
    """Whether `path` is an address (gs://...). Its files cannot be locked, appended to or renamed."""
    return "://" in str(path)


def open_to_read(path) -> io.BufferedReader:
    """A file, opened. Raises UserError if it is no regular file, and OSError if it cannot be opened. What the shell hands
    over by a name, /dev/stdin or /dev/fd/N for <(COMMAND), may be a pipe: the user who wrote it waits for it."""
    if in_bucket(path):
        from etils import epath

        return cast(io.BufferedReader, epath.Path(path).open("rb"))
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _FLAGS))  # noqa: SIM115 - the caller's
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a directory
            raise not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) and not _is_handed_over(path):
        file.close()
        raise not_regular(path)
    os.set_blocking(file.fileno(), True)
    return file


def not_regular(path) -> UserError:
    return UserError(f"{path}: it must be a regular file")


def _is_handed_over(path) -> bool:
    return str(path) == "/dev/stdin" or str(path).startswith("/dev/fd/")


def name_of(file: io.BufferedReader) -> str:
    """A name of an open local file, for libraries that take no open file: it stays that of this file."""
    return f"/dev/fd/{file.fileno()}"
