"""A cache of directories. Each is named by the hash of its inputs, built once and published by one rename.

A build runs in a hidden temporary directory next to its target, under a file lock. This is safe under kill -9: the
operating system releases the lock of a dead process, so the process that gets the lock knows that all temporary
directories of that target are abandoned, and removes them.
"""

import glob
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import (
    found_in,
    inside,
    make_directory,
    names_in,
    open_lock,
    read_bytes,
    remove_directory,
    rename,
    write_text,
)
from xfresearch.runtime.opening import open_to_read

if sys.platform != "win32":  # there, without locks, two processes may build the same entry, but renames stay atomic
    import fcntl


def cache_root(data=None) -> Path:
    """The cache directory: `cache_dir` of `data`, a DataConfig or None, else $XFRESEARCH_CACHE, else ~/.cache/xfresearch.
    Raises UserError for a bucket."""
    chosen = str((data and data.cache_dir) or os.environ.get("XFRESEARCH_CACHE") or "~/.cache/xfresearch")
    if "://" in chosen:
        name = "config.data.cache_dir" if data and data.cache_dir else "XFRESEARCH_CACHE"
        raise UserError(f"{name}={chosen} is not allowed: it must be a directory of this machine, not of a bucket")
    return Path(chosen).expanduser().absolute()


def enable_compilation_cache(data) -> None:
    """Makes JAX cache compiled programs under `cache_root`, unless $JAX_COMPILATION_CACHE_DIR names another directory.

    Call it before the first compilation.
    """
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_root(data) / "compiled"))


def digest(inputs) -> str:
    """16 hexadecimal digits of a SHA-256 hash of `inputs`, any value that JSON can represent."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def build_once(target: Path, build: Callable[[Path], None], valid: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Returns `target`, a directory. If it is not valid yet, `build(temporary_directory)` fills it first.

    Several processes may call this at once: one builds, the others wait for it. Raises UserError if the cache directory
    is not writable.
    """
    if valid(target):
        return target
    with locked(target) as has_lock:
        if has_lock:
            _remove_abandoned(target)
        if not valid(target):
            _build(target, build, valid)
    return target


def make_writable(directory: Path) -> None:
    """Makes a directory of the cache. Raises UserError if nothing can be written there."""
    try:
        make_directory(directory)
    except OSError as error:
        raise UserError(
            f"cannot make the cache directory {directory}: {error.strerror}; set config.data.cache_dir"
        ) from None
    if not os.access(directory, os.W_OK):
        raise UserError(f"cannot write to the cache directory {directory}; set config.data.cache_dir")


@contextmanager
def locked(target: Path):
    """Holds the lock of `target`; yields False if the file system has no locks.

    Raises UserError if the cache directory is not writable.
    """
    make_writable(target.parent)
    file = target.with_name(f".{target.name}.lock")
    try:
        lock = open_lock(inside(target.parent, file.name))
    except PermissionError:  # another user of a shared cache made it
        lock = open_lock(file, os.O_RDONLY)
    try:
        yield _lock(lock)
    finally:
        os.close(lock)


def _lock(lock: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _build(target: Path, build, valid) -> None:
    temporary = target.with_name(f"{_prefix(target)}{uuid.uuid4().hex}")
    make_directory(temporary)
    try:
        build(temporary)
        _publish(temporary, target, valid)
    finally:
        _remove(temporary)


def _publish(temporary: Path, target: Path, valid) -> None:
    if target.exists() and not valid(target):
        damaged = temporary.with_name(f"{_prefix(target)}{uuid.uuid4().hex}")
        rename(target, damaged)
        _remove(damaged)
    try:
        rename(temporary, target)
    except OSError:
        # Without locks another process may have published first. Its result is equally good.
        if not valid(target):
            raise


def _remove_abandoned(target: Path) -> None:
    for name in names_in(target.parent, f"{glob.escape(_prefix(target))}*"):
        _remove(target.parent / name)


def _remove(directory: Path) -> None:
    with suppress(OSError):  # a directory of another user of a shared cache
        remove_directory(directory.parent, directory.name)


def _prefix(target: Path) -> str:
    return f".{target.name}.tmp-"


def read_meta(directory: Path) -> dict:
    """What `write_meta` wrote."""
    return json.loads(read_bytes(inside(directory, "meta.json")))


def complete(directory: Path) -> bool:
    """Whether `directory` holds every file with the content recorded in its meta.json, which is written last."""
    try:
        files = read_meta(directory)["files"]
        return all(content_of(inside(directory, name)) == content for name, content in files.items())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False


def write_meta(directory: Path, meta: dict) -> None:
    """Writes meta.json with a digest of every other file, for `complete`. Those files must be finished."""
    files = [path for path in found_in(directory, "**/*") if path.is_file()]
    meta = {**meta, "files": {str(p.relative_to(directory)): content_of(p) for p in files}}
    write_text(directory / "meta.json", json.dumps(meta, indent=1) + "\n")


def content_of(file) -> str:
    """The SHA-256 hash of a file, computed once in a process."""
    stat = os.stat(file)
    return _hashed(file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@cache
def _hashed(file: Path, *version: int) -> str:
    with open_to_read(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
