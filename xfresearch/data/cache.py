"""Directories that are built once: named by the hash of their inputs, published by one rename, safe under kill -9.

A build happens in a hidden temporary directory beside its target, under a file lock. The kernel drops the lock of a
dead process, so whoever gets the lock knows that every temporary of that target is abandoned, and removes it.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from xfresearch.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has none: renames are still atomic, only work may be done twice
    fcntl = None


def cache_root(data) -> Path:
    """`data.cache_dir`, else $XFRESEARCH_CACHE, else ~/.cache/xfresearch."""
    chosen = data.cache_dir or os.environ.get("XFRESEARCH_CACHE") or "~/.cache/xfresearch"
    return Path(chosen).expanduser().absolute()


def keep_programs(data) -> None:
    """From now on JAX keeps compiled programs in the cache, or in $JAX_COMPILATION_CACHE_DIR where that is set; to be called
    before the first one is compiled."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_root(data) / "compiled"))


def digest(inputs) -> str:
    """16 hexadecimal digits that stand for `inputs`, anything JSON can write."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def build_once(target: Path, build: Callable[[Path], None], valid: Callable[[Path], bool] = Path.is_dir) -> Path:
    """`target`, a directory that `build(temporary directory)` fills where no valid one exists yet.

    Any number of processes may ask at once: one builds, the others wait for it. UserError if it cannot be written.
    """
    if valid(target):
        return target
    with locked(target) as alone:
        if alone:
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
    """Hold the lock of `target`; yields False where the file system has no locks. UserError if it cannot be written."""
    _make_writable(target.parent)
    lock = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
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
        if not valid(target):  # else a process that could not be locked out was first, and its result is as good
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
    """Whether `directory` holds every file at the size that its meta.json, written last, names."""
    try:
        sizes = read_json(directory / "meta.json")["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def write_meta(directory: Path, meta: dict) -> None:
    """meta.json of a directory whose other files are finished, with their sizes, for `complete`."""
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    write_json(directory / "meta.json", {**meta, "files": sizes})
