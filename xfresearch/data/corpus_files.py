"""Finds the files of a corpus and reads their documents. Raises UserError with the file and line of a problem."""

import glob
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from pathlib import Path

from xfresearch.data.column_formats import FORMATS
from xfresearch.data.rows import LONGEST, READABLE, READERS, check_utf8, text_of, utf8
from xfresearch.runtime.compression import SUFFIXES
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside, require_no_dangling_link
from xfresearch.runtime.formats import BROKEN, JSON, PROSE, WHAT, FileFormat, refused, sniff, suffix_of

# The files that a directory is searched for. A .json file counts if it has rows; others describe a data set or a program.
TEXT_SUFFIXES = (".txt", ".text", ".tokens", *PROSE)
ROW_SUFFIXES = (*JSON, ".csv", ".tsv", *dict.fromkeys(chain.from_iterable(each.suffixes for each in FORMATS.values())))
SUFFIXES_READ = (*ROW_SUFFIXES, *TEXT_SUFFIXES)
READER = 4  # increased when the reader finds other documents in the same files, so that caches are made again
PIECE = 1 << 20  # bytes of a document of a text that is longer than LONGEST


def names_files(path: str) -> bool:
    """Whether `path` is an existing file or directory, or a glob with a match."""
    base = Path(path).expanduser()
    return bool(path) and (base.exists() or bool(_glob(base)))


def find_files(path: str, corpus: str, links: str = "inside", suffixes: Sequence[str] = SUFFIXES_READ) -> list[Path]:
    """The files of a path, which is a file, a directory (searched recursively, for names with one of the `suffixes`) or a
    glob; sorted. `links` is data.links.

    Raises UserError if there are none, and for a link that leads out of the directory, but with links='anywhere'.
    """
    base = Path(path).expanduser()
    if base.is_dir():
        found = [file for file in _below(base, links, suffixes) if _is_text(file)]
        wanted = f"files named *{', *'.join(suffixes)} (also with {', '.join(SUFFIXES)})"
    elif base.exists():
        return [base]
    else:
        fixed = Path(*takewhile(lambda part: not glob.has_magic(part), base.parts))
        found = [_followed(fixed, file, links) for file in _glob(base) if not file.is_dir()]
        wanted = "an existing file, directory or glob"
    if not found:
        raise UserError(f"corpus {corpus!r}: no file matches {path!r}; it must be {wanted}")
    return sorted(found)


def _glob(pattern: Path) -> list[Path]:
    return [Path(path) for path in glob.glob(str(pattern), recursive=True)]


def _below(base: Path, links: str, suffixes: Sequence[str]) -> Iterator[Path]:
    """What has one of the `suffixes` in a directory and in those below it, but for hidden ones. A directory that
    links lead to is searched once, and not as a link if it is below `base`."""
    top = Path(os.path.realpath(base))
    waiting, known = [base], {top}
    while waiting:
        for path in waiting.pop().iterdir():
            if path.name.startswith(".") or path.name == "__pycache__":
                continue
            if not path.is_dir():
                if suffix_of(path) in suffixes:
                    yield _followed(base, path, links) if path.is_symlink() else path
            elif not path.is_symlink():
                waiting.append(path)
            else:
                target = Path(os.path.realpath(_followed(base, path, links)))
                if target not in known and not target.is_relative_to(top):
                    known.add(target)
                    waiting.append(path)


def _followed(base: Path, path: Path, links: str) -> Path:
    """`path`, after a check that no link on the way from `base` leads out of it, unless the user follows such links."""
    if links == "inside":
        try:
            inside(base, path.relative_to(base))
        except UserError as error:
            raise UserError(f"{error}, or give --config.data.links=anywhere") from None
    require_no_dangling_link(path)
    return path


def _is_text(path: Path) -> bool:
    return suffix_of(path) != ".json" or sniff(path).kind in (*READERS, *BROKEN)


def read_documents(path: Path, field: str) -> Iterator[bytes]:
    """The UTF-8 documents of one file: `field` of each row of a file of records, or the whole of a text (`_texts`). Raises
    UserError for a file of another kind."""
    file_format = sniff(path)
    if file_format.kind in READERS:
        number = -1
        for number, (where, row) in enumerate(READERS[file_format.kind](path, file_format, field)):  # noqa: B007
            yield text_of(row, where, field)
        if number < 0:
            raise UserError(f"{path}: {WHAT[file_format.kind]} without a row")
    elif file_format.kind == "text":
        line = 1
        for text in _texts(path, file_format):
            check_utf8(text, path, line)
            line += text.count(b"\n")
            yield text
    elif file_format.kind != "empty" or path.name != "__init__.py":  # an empty __init__.py is normal in a Python package
        raise refused(path, file_format, f"a corpus must be text, {READABLE}")


def _texts(path: Path, file_format: FileFormat) -> Iterator[bytes]:
    """A text as one document. A text of more than LONGEST bytes, which may not fit in memory, becomes documents of about
    PIECE bytes, cut at line ends, or between characters where there are no line ends."""
    with utf8(path, file_format) as file:
        text = file.read(LONGEST)
        more = file.read(PIECE)
        if not more:
            yield text
            return
        first = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
        rest = b""
        for chunk in chain(first, [more], iter(partial(file.read, PIECE), b"")):
            block = rest + chunk
            end = block.rfind(b"\n") + 1
            if not end and len(block) >= 2 * PIECE:
                end = last_character(block) or len(block)
            if end:
                yield block[:end]
            rest = block[end:]
        if rest:
            yield rest


def last_character(text: bytes) -> int:
    """Where the last character of a UTF-8 text begins; it may be incomplete."""
    at = len(text) - 1
    while at > 0 and text[at] & 0xC0 == 0x80:
        at -= 1
    return at
