"""The gate to files of directories that others may have written: runs, edits, studies, Hugging Face folders, caches.

A path below a directory that the user named is made by `inside`, which refuses a link that leads out. The directory itself
may be a link. Files are read up to a limit, and only regular ones; they are written whole or not at all. Outside this module
the code of such directories opens, lists and removes nothing (tests/test_gate.py).
"""

import errno
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from xfresearch.runtime.errors import UserError, require_new
from xfresearch.runtime.formats import check_whole
from xfresearch.runtime.opening import in_bucket, not_regular, open_to_read

if TYPE_CHECKING:  # it takes a tenth of a second
    from etils import epath

MOST = 1 << 28  # bytes of a file that is read whole; the largest tokenizers and indices have a tenth of it
PIPED = 1 << 26  # bytes that are read of a pipe, or of another file that has no size
_HUB = ("models--", "datasets--", "spaces--")  # how directories of the Hub's cache begin


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
    except OSError as error:
        if error.errno == errno.ELOOP:  # links in a circle lead to nothing
            return None
        raise


def make_directory(path) -> None:
    """Makes a directory and those above it, if there is none. `path.mkdir(exist_ok=True)` would say that a file is in the
    way if the disk cannot tell that it is a directory. Raises UserError for a link that leads nowhere."""
    if not is_directory(path):
        require_no_dangling_link(path)
        path.mkdir(parents=True, exist_ok=True)


def require_no_dangling_link(path) -> None:
    """Raises UserError if `path` is a link to something that does not exist."""
    if not in_bucket(path) and os.path.islink(path) and not exists(path):
        raise UserError(f"{path} is a link to {os.readlink(path)}, which does not exist")


def inside(root: str | os.PathLike[str], *names: str | os.PathLike[str]) -> "epath.Path":
    """The epath.Path root/names..., of a file or directory, there or not, in a directory that the user named.

    Raises UserError if a link on the way from `root` leads out of it. `root` itself may be a link. The files of a model in
    the Hub's cache, models--NAME/snapshots/COMMIT, are links to models--NAME/blobs.
    """
    from etils import epath

    path = epath.Path(root).joinpath(*names)
    if not in_bucket(path):
        whole, target = Path(os.path.realpath(root)), Path(os.path.realpath(path))
        if not any(target.is_relative_to(each) for each in (whole, *_blobs(whole))):
            raise UserError(f"{path}: a link that leaves the folder is not followed: replace it by the file, or remove it")
    return path


def _blobs(folder: Path) -> list[Path]:
    """Where links lead in a snapshot of the Hub's cache, or in a directory below it; [] for any other directory."""
    named = (each for each in (folder, *folder.parents) if each.name == "snapshots")
    return [each.parent / "blobs" for each in named if each.parent.name.startswith(_HUB)]


def check_tree(root, *names) -> None:
    """Raises UserError if a link in root/names..., or in a directory below it, leads out of `root`, and for a pipe, a socket
    or a device: libraries that take the name of a directory would wait for it."""
    top = inside(root, *names)
    if in_bucket(top) or not is_directory(top):
        return
    for parent, directories, files in os.walk(top):
        for path in (os.path.join(parent, name) for name in (*directories, *files)):
            if os.path.islink(path):
                inside(root, path)
            mode = _mode(path)
            if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise not_regular(path)


def names_in(folder, pattern: str = "*") -> list[str]:
    """The sorted names in a directory; [] if there is none. Nothing is opened. Raises OSError if it cannot be listed; a glob
    would be empty."""
    return sorted(p.name for p in folder.iterdir() if fnmatchcase(p.name, pattern)) if is_directory(folder) else []


def found_in(folder, pattern: str) -> list:
    """The paths below a directory that match a pattern such as '*/*/checkpoints': one request, also in a bucket. Nothing is
    opened."""
    return sorted(folder.glob(pattern))


def files_in(root, *names, pattern: str = "*") -> list:
    """The regular files in the directory root/names..., sorted; [] if there is none. Directories are left out."""
    folder = inside(root, *names)
    paths = [inside(root, *names, name) for name in names_in(folder, pattern)]
    return [path for path in paths if _is_file(path)]


def _is_file(path) -> bool:
    return path.is_file() if in_bucket(path) else stat.S_ISREG(_mode(path) or 0)


def read_bytes(path, most: int = MOST) -> bytes:
    """The content of a file. Raises UserError for one of more than `most` bytes, and for what is no regular file: a pipe
    would be waited for. Raises OSError if it cannot be read."""
    from etils import epath

    if in_bucket(path):
        path = epath.Path(path)
        _require_at_most(path, path.stat().length, most)
        return path.read_bytes()
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(size or PIPED + 1)  # a pipe has no size
        _require_at_most(path, max(size, len(content)), most if size else min(most, PIPED))
        return content


def _require_at_most(path, size: int, most: int) -> None:
    if size > most:
        raise UserError(f"{path}: the file has {size:,} bytes: it must have at most {most:,}")


def write_object(path, content: bytes) -> None:
    """Writes an object of a bucket, which appears whole."""
    path.write_bytes(content)


def open_for_appending(path) -> int:
    """A descriptor of a local file, made if there is none, that writes at its end."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def append(path, content: bytes) -> None:
    """Adds to a local file in a single write."""
    file = open_for_appending(path)
    try:
        os.write(file, content)
    finally:
        os.close(file)


def open_lock(path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """A descriptor of a local file to lock, made if there is none. The content of the file stays."""
    return os.open(path, flags, 0o666)


def rename(path, target) -> None:
    """Gives a file or directory that this run wrote another name in its directory."""
    path.rename(target)


def truncate(path, size: int) -> None:
    """Cuts a local file that this run wrote to `size` bytes; this needs no space on a full disk."""
    os.truncate(path, size)


def remove(path) -> None:
    """Removes a file that this run wrote, if it is there. A link is removed, and not what it leads to."""
    path.unlink(missing_ok=True)


def remove_files(root, *names, wrote) -> None:
    """Removes the files of root/names... whose names satisfy `wrote`, and the directory if nothing is left in it."""
    for path in files_in(root, *names):
        if wrote(path.name):
            remove(path)
    if not in_bucket(root):
        with suppress(OSError):  # others' files are left
            os.rmdir(inside(root, *names))


def remove_directory(root, *names) -> None:
    """Removes a directory that this run wrote, if it is there, with all that is in it. Links are not followed."""
    with suppress(FileNotFoundError):  # another process may have removed it
        path = inside(root, *names)
        if is_directory(path):
            path.rmtree()


def write_bytes(path, content: bytes) -> None:
    """Writes a file atomically: under a temporary name, which is then renamed. It survives a crash of the machine."""
    from etils import epath

    target = epath.Path(path).expanduser()
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
    folder = inside(run, "damaged")
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
    write_text(path, json.dumps(finite(value), indent=2, default=_number) + "\n")


def read_object(path, most: int = MOST) -> dict:
    """The JSON object in a file. Raises UserError if the file holds anything else, or more than `most` bytes."""
    from etils import epath

    try:
        value = json.loads(read_bytes(path, most))
    except (ValueError, RecursionError) as error:
        check_whole(epath.Path(path))
        raise UserError(f"{path}: not valid JSON: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}: it must be an object")
    return value


def object_in(files: Mapping[str, bytes], name: str) -> dict:
    """The JSON object in one of the `files` of a folder, by name; {} if there is none. Raises UserError for a file that is
    not JSON."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def write_rows(path, rows: dict, name: str = "rows") -> None:
    """Writes {name: rows} as JSON with one row per line. Otherwise like `write_json`."""
    lines = (f"{json.dumps(key)}: {json.dumps(finite(row), default=_number)}" for key, row in rows.items())
    write_text(path, f"{{{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}}\n")


def finite(value):
    """`value` with None in place of NaN and infinity, which JSON cannot write."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value):
    """A number of NumPy or JAX as JSON has it."""
    return finite(float(value))


def check_output(option: str, path: str) -> None:
    """Raises UserError if the file cannot be written. Call it before long work. Creates the parent directory."""
    from etils import epath

    check_parent(option, path)
    if epath.Path(path).expanduser().is_dir():
        raise UserError(f"{option}={path} cannot be written: it is a directory")


def check_parent(option: str, path) -> None:
    """Raises UserError if nothing can be written beside `path`, as for a new directory. Creates the parent directory."""
    from etils import epath

    target = epath.Path(path).expanduser()  # a shell leaves the ~ of --json=~/a.json
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(target)
        temporary.write_text("")
        temporary.unlink()
    except OSError as error:
        raise UserError(f"{option}={path} cannot be written: {error.strerror or error}") from None


@contextmanager
def new_directory(target, action: str) -> Iterator:
    """Yields a temporary directory to fill. At the end of the `with` block it becomes `target`; on an error it is
    deleted.

    Raises UserError if `target` exists and is not an empty directory.
    """
    require_new(target, action)
    require_no_dangling_link(target)
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
    return target.parent / f".{target.name}.{os.urandom(6).hex()}.tmp"
