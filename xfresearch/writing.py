"""Directories that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from etils import epath

from xfresearch.errors import require_new


@contextmanager
def new_directory(target: epath.Path, action: str) -> Iterator[epath.Path]:
    """A directory to be filled within a `with`, after which it is `target`; on an error nothing is left of it.

    UserError where something is at `target` already, an empty directory apart.
    """
    require_new(target, action)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    finally:
        if temporary.exists():
            temporary.rmtree()
