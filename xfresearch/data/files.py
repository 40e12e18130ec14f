"""Reads text and .jsonl files, plain or compressed (.gz, .xz). Raises UserError with the file and line of a problem."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

from xfresearch.errors import UserError, nearest

TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".rst", ".tex", ".tokens", ".jsonl", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp",
    ".rs", ".go", ".java", ".js", ".ts", ".sh",
)  # fmt: skip
COMPRESSED_SUFFIXES = (".gz", ".xz")
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def names_files(path: str) -> bool:
    """Whether `path` is an existing file or directory, or a glob with a match."""
    base = Path(path).expanduser()
    return bool(path) and (base.exists() or bool(_glob(base)))


def find_files(path: str, corpus: str) -> list[Path]:
    """The files of a path, which is a file, a directory (searched recursively) or a glob; sorted.

    Raises UserError if there are none.
    """
    base = Path(path).expanduser()
    if base.is_file():
        return [base]
    if base.is_dir():
        found = [p for p in base.rglob("*") if p.is_file() and _is_text(p) and not _is_hidden(p, base)]
        wanted = f"files named *{', *'.join(TEXT_SUFFIXES)} (also with .gz or .xz)"
    else:
        found = [file for file in _glob(base) if file.is_file()]
        wanted = "an existing file, directory or glob"
    if not found:
        raise UserError(f"corpus {corpus!r}: no file matches {path!r}; it must be {wanted}")
    return sorted(found)


def _glob(pattern: Path) -> list[Path]:
    import glob

    return [Path(path) for path in glob.glob(str(pattern), recursive=True)]


def _is_text(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    return name.suffix in TEXT_SUFFIXES


def _is_hidden(path: Path, base: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(base).parts)


def read_documents(path: Path, field: str) -> Iterator[bytes]:
    """The UTF-8 documents of one file: `field` of each line of a .jsonl file, or the whole of any other."""
    name = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    yield from _read_jsonl(path, field) if name.suffix == ".jsonl" else _read_whole(path)


def _read_whole(path: Path) -> Iterator[bytes]:
    with _reading(path) as file:
        text = file.read()
    if text:
        check_utf8(text, path)
        yield text
    elif path.name != "__init__.py":  # an empty __init__.py is normal in a Python package
        raise UserError(f"{path}: the file is empty")


def _read_jsonl(path: Path, field: str) -> Iterator[bytes]:
    number = 0
    with _reading(path) as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield _json_text(line, path, number, field)
    if not number:
        raise UserError(f"{path}: the file is empty")


def _json_text(line: bytes, path: Path, number: int, field: str) -> bytes:
    check_utf8(line, path, number)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: invalid JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(record, dict):
        raise UserError(
            f"{path}:{number}: the line is a JSON {type(record).__name__}; it must be an object with field {field!r}"
        )
    if field not in record:
        present = ", ".join(record) or "none"
        raise UserError(
            f"{path}:{number}: no field {field!r}; fields present: {present}{nearest(field, record)}"
            " (config.data.field)"
        )
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{path}:{number}: field {field!r} is a {type(text).__name__}; it must be a string")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{path}:{number}: field {field!r} holds half of a surrogate pair, which UTF-8 cannot encode"
        ) from None


def check_utf8(text: bytes, path: Path, line: int = 1) -> None:
    """Raises UserError with the line of the first byte that is not UTF-8. `line` is the line at which `text` starts."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line += text.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}: not UTF-8: byte 0x{text[error.start]:02x} ({error.reason})") from None


class _reading:
    """Opens `path`, decompresses by its suffix, and turns I/O and decompression errors into UserError."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        opener = {".gz": gzip.open, ".xz": lzma.open}.get(self.path.suffix, open)
        try:
            self.file = opener(self.path, "rb")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        return self.file

    def __exit__(self, kind, error, traceback):
        self.file.close()
        if isinstance(error, _DECOMPRESSION_ERRORS):
            raise UserError(f"{self.path}: the compressed file is damaged: {error}") from None
        if isinstance(error, OSError):
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from None
