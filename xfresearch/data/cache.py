"""A cache of directories. Each is named by the hash of its inputs, built once and published by one rename.

A build runs in a hidden temporary directory next to its target, under a file lock. This is safe under kill -9: the
operating system releases the lock of a dead process, so the process that gets the lock knows that all temporary
directories of that target are abandoned, and removes them.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from xfresearch.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: without locks two processes may build the same entry, but renames stay atomic
    fcntl = None


def cache_root(data) -> Path:
    """The cache directory: `data.cache_dir`, else $XFRESEARCH_CACHE, else ~/.cache/xfresearch. Raises UserError for a
    bucket."""
    chosen = str(data.cache_dir or os.environ.get("XFRESEARCH_CACHE") or "~/.cache/xfresearch")
    if "://" in chosen:
        name = "config.data.cache_dir" if data.cache_dir else "XFRESEARCH_CACHE"
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


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
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
    _make_writable(target.parent)
    file = target.with_name(f".{target.name}.lock")
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user of a shared cache made it
        lock = os.open(file, os.O_RDONLY)
    try:
        yield _lock(lock)
    finally:
        os.close(lock)


def _lock(lock: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _build(target: Path, build, valid) -> None:
    temporary = target.with_name(f"{_prefix(target)}{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        build(temporary)
        _publish(temporary, target, valid)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, target: Path, valid) -> None:
    if target.exists() and not valid(target):
        damaged = temporary.with_name(f"{_prefix(target)}{uuid.uuid4().hex}")
        target.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(target)
    except OSError:
        # Without locks another process may have published first. Its result is equally good.
        if not valid(target):
            raise


def _remove_abandoned(target: Path) -> None:
    for path in target.parent.glob(f"{_prefix(target)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.tmp-"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def complete(directory: Path) -> bool:
    """Whether `directory` holds every file with the content recorded in its meta.json, which is written last."""
    try:
        files = read_json(directory / "meta.json")["files"]
        return all(_content(directory / name) == content for name, content in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_meta(directory: Path, meta: dict) -> None:
    """Writes meta.json with a digest of every other file, for `complete`. Those files must be finished."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    write_json(directory / "meta.json", {**meta, "files": {str(p.relative_to(directory)): _content(p) for p in files}})


def _content(file: Path) -> str:
    """The SHA-256 hash of a file, computed once in a process."""
    stat = file.stat()
    return _hashed(file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@cache
def _hashed(file: Path, *version: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
