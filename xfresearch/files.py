"""Atomic writes of files and directories, and JSON that any reader accepts."""

import errno
import json
import math
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xfresearch.errors import UserError, require_new
from xfresearch.formats import check_whole


def in_bucket(path) -> bool:
    """Whether `path` is an address (gs://...). Its files cannot be locked, appended to or renamed."""
    return "://" in str(path)


def exists(path) -> bool:
    """Whether there is a file or directory at `path`. Raises OSError if the disk cannot tell; `path.exists()` would say
    no."""
    if in_bucket(path):
        from etils import epath

        return epath.Path(path).exists()
    return _mode(path) is not None


def is_directory(path) -> bool:
    """Whether there is a directory at `path`. Raises OSError if the disk cannot tell; `path.is_dir()` would say no."""
    if in_bucket(path):
        from etils import epath

        return epath.Path(path).is_dir()
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_directory(path) -> None:
    """Makes a directory and those above it, if there is none. `path.mkdir(exist_ok=True)` would say that a file is in the
    way if the disk cannot tell that it is a directory."""
    if not is_directory(path):
        path.mkdir(parents=True, exist_ok=True)


def write_bytes(path, content: bytes) -> None:
    """Writes a file atomically: under a temporary name, which is then renamed. It survives a crash of the machine."""
    from etils import epath

    target = epath.Path(path)
    make_directory(target.parent)
    temporary = _temporary(target)
    try:
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync(target.parent)


def write_text(path, text: str) -> None:
    """Writes a text atomically, like `write_bytes`."""
    write_bytes(path, text.encode())


def sync(path) -> None:
    """Waits until a local file or directory is on its disk: a rename may reach the disk before the file's content."""
    if in_bucket(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_damaged(path, reason: str = "") -> Path:
    """Moves a damaged file or directory of a run to the run's damaged/, and prints a warning. Returns its new path.

    `path` is WORKDIR/NAME or WORKDIR/checkpoints/NAME.
    """
    from etils import epath

    path = epath.Path(path)
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    folder = run / "damaged"
    make_directory(folder)
    target = folder / f"{path.name}-{len(list(folder.iterdir()))}"
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # checkpoints/ may be a link to another disk
            raise
        shutil.move(path, target)
    print(f"warning: moved {path} to {target}{reason and f': {reason}'}", file=sys.stderr)
    return target


def write_json(path, value) -> None:
    """Writes `value` as JSON, atomically. Numbers that are not finite become null."""
    write_text(path, json.dumps(finite(value), indent=2, default=float) + "\n")


def read_object(path) -> dict:
    """The JSON object in a file. Raises UserError if the file holds anything else."""
    from etils import epath

    try:
        value = json.loads(epath.Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        check_whole(epath.Path(path))
        raise UserError(f"{path}: not valid JSON: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}: it must be an object")
    return value


def write_rows(path, rows: dict, name: str = "rows") -> None:
    """Writes {name: rows} as JSON with one row per line. Otherwise like `write_json`."""
    lines = (f"{json.dumps(key)}: {json.dumps(finite(row), default=float)}" for key, row in rows.items())
    write_text(path, f"{{{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}}\n")


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
    """A name that no other process has: pods have the same process numbers."""
    return target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
