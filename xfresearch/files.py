"""Files and directories that appear whole or not at all, and JSON that any reader takes."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

from xfresearch.errors import UserError, require_new


def write_text(path, text: str) -> None:
    """Writes a text under a temporary name, then renames it."""
    from etils import epath

    target = epath.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    temporary.write_text(text)
    temporary.replace(target)


def write_json(path, value) -> None:
    """Writes `value` as JSON, with null for numbers that are not finite; as `write_text`."""
    write_text(path, json.dumps(finite(value), indent=2, default=float) + "\n")


def write_rows(path, rows: dict) -> None:
    """Writes {"rows": rows} as JSON with each row on one line; as `write_json`."""
    lines = (f"{json.dumps(name)}: {json.dumps(finite(row), default=float)}" for name, row in rows.items())
    write_text(path, '{"rows": {\n' + ",\n".join(lines) + "\n}}\n")


def finite(value):
    """`value` with None for every number that JSON cannot write."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_output(option: str, path: str) -> None:
    """UserError where a file of that name cannot be written; to be called before long work. Makes its folder."""
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
        raise UserError(f"{option}={path} cannot be written: it is a folder")


@contextmanager
def new_directory(target, action: str) -> Iterator:
    """A directory to be filled within a `with`, after which it is `target`; on an error nothing is left of it.

    UserError where something is at `target` already, an empty directory apart.
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
