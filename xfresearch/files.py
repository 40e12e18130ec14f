"""Atomic writes of files and directories, and JSON that any reader accepts."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

from xfresearch.errors import UserError, require_new


def write_text(path, text: str) -> None:
    """Writes a text atomically: under a temporary name, which is then renamed."""
    from etils import epath

    target = epath.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    temporary.write_text(text)
    temporary.replace(target)


def write_json(path, value) -> None:
    """Writes `value` as JSON, atomically. Numbers that are not finite become null."""
    write_text(path, json.dumps(finite(value), indent=2, default=float) + "\n")


def write_rows(path, rows: dict) -> None:
    """Writes {"rows": rows} as JSON with one row per line. Otherwise like `write_json`."""
    lines = (f"{json.dumps(name)}: {json.dumps(finite(row), default=float)}" for name, row in rows.items())
    write_text(path, '{"rows": {\n' + ",\n".join(lines) + "\n}}\n")


def finite(value):
    """`value` with None in place of NaN and infinity, which JSON cannot write."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_output(option: str, path: str) -> None:
    """Raises UserError if the file cannot be written. Call it before long work. Creates the parent directory."""
    from etils import epath

    target = epath.Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(target)
        temporary.write_text("")
        temporary.unlink()
    except OSError as error:
        raise UserError(f"{option}={path} cannot be written: {error.strerror or error}") from None
    if target.is_dir():
        raise UserError(f"{option}={path} cannot be written: it is a directory")


@contextmanager
def new_directory(target, action: str) -> Iterator:
    """Yields a temporary directory to fill. At the end of the `with` block it becomes `target`; on an error it is
    deleted.

    Raises UserError if `target` exists and is not an empty directory.
    """
    require_new(target, action)
    temporary = _temporary(target)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    finally:
        if temporary.exists():
            temporary.rmtree()


def _temporary(target):
    return target.parent / f".{target.name}.{os.getpid()}.tmp"
