"""The rows of files of records: JSON lines, a JSON array, CSV, TSV, columns (column_formats.py). They are read as streams.

A reader yields (place of the row, for messages; the row, which is a JSON value or {column: value}). Its arguments are the
fields that will be read, and the option that names them, for messages. Other columns of a file of columns are not read.
Raises UserError for a damaged file, with the line or the number of the row.
"""

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import BinaryIO

from xfresearch.data.column_formats import FORMATS
from xfresearch.data.table_form import WORDS, Form, form_of
from xfresearch.runtime import confined
from xfresearch.runtime.compression import FREE, RATIO, Chunks, opened
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.formats import HEAD, FileFormat
from xfresearch.runtime.opening import open_to_read

LONGEST = 1 << 26  # bytes of a row: a file that never ends a row must not fill the memory
_ROW = 256  # bytes that a row of columns takes at least, as Python holds it
_SECONDS, _PER_SECOND = 3, 1 << 23  # of processor time to decode columns, and bytes of the file for one more
_MEMORY = 1 << 29  # bytes to decode columns, beside four times the size of the file
_CHUNK = 1 << 20  # bytes, or characters of a JSON array
_SHOWN = 20  # fields in a message
TEXT_FIELD = "config.data.text_field"
_SPACES = re.compile(r"[ \t\r\n]*")


@contextmanager
def utf8(path, file_format: FileFormat) -> Iterator[BinaryIO]:
    """The content of a text file, decompressed and in UTF-8, which is not checked if the file is in UTF-8 already."""
    with opened(path, file_format.compression) as stream:
        encoding = file_format.encoding
        yield stream if encoding == "utf-8" else io.BufferedReader(Chunks(_recoded(stream, path, encoding)))


def _recoded(stream: BinaryIO, path, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while content := stream.read(HEAD):
            yield decoder.decode(content).encode()
        decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not {encoding.upper()}: {error.reason}") from None


def check_utf8(text: bytes, path, line: int = 1) -> None:
    """Raises UserError with the line of the first byte that is not UTF-8. `line` is the line at which `text` starts."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _CHUNK):  # the decoded text would take up to four times as much memory
        try:
            before = len(decoder.getstate()[0])
            decoder.decode(text[start : start + _CHUNK], start + _CHUNK >= len(text))
        except UnicodeDecodeError as error:
            at = start - before + error.start
            line += text.count(b"\n", 0, at)
            raise not_utf8(f"{path}:{line}", text[at], error.reason) from None


def not_utf8(where: str, byte: int, reason: str) -> UserError:
    wanted = "write it in UTF-8, as `iconv -f WINDOWS-1252 -t UTF-8` does for a text of Windows"
    return UserError(f"{where}: not UTF-8: byte 0x{byte:02x} ({reason}): {wanted}")


def text_of(row, where: str, field: str, option: str = TEXT_FIELD) -> bytes:
    """The text in a field of a row, in UTF-8; field 'a.b' is also field b of the object in field a. Raises UserError, which
    lists the fields that there are."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: the line is a JSON {type(row).__name__}; it must be an object with field {field!r}")
    text = row
    for name in [field] if field in row else field.split("."):
        if not isinstance(text, dict) or name not in text:
            raise no_field(where, field, [name for name, _ in _leaves(row)], option)
        text = text[name]
    if not isinstance(text, str):
        kind = "null" if text is None else f"a {type(text).__name__}"
        raise UserError(f"{where}: field {field!r} is {kind}; it must be a string{_strings(row, field, option)}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: field {field!r} holds half of a surrogate pair, which UTF-8 cannot encode") from None


def _strings(row: dict, field: str, option: str) -> str:
    others = [name for name, value in _leaves(row) if isinstance(value, str) and name != field]
    return f"; fields with strings: {_listed(others)} ({option})" if others else ""


def _leaves(row: dict, depth: int = 4) -> Iterator[tuple[str, object]]:
    """The fields of a row, and those of the objects in it."""
    for name, value in row.items():
        if isinstance(value, dict) and value and depth:
            yield from ((f"{name}.{below}", leaf) for below, leaf in _leaves(value, depth - 1))
        else:
            yield name, value


def no_field(where: str, field: str, fields, option: str = TEXT_FIELD) -> UserError:
    """The error of a row, or of a file, that has no such field."""
    present = f"fields present: {_listed(fields)}{nearest(field, fields)}"
    return UserError(f"{where}: no field {field!r}; {present} ({option})")


def _listed(fields) -> str:
    names = [str(name) if len(str(name)) <= 40 else f"{str(name)[:37]}..." for name in fields]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "none").replace("\n", " ") + more


def json_lines(path, file_format: FileFormat, *fields: str, option: str = "") -> Iterator[tuple[str, object]]:
    """The JSON value on each line that is not blank. Lines end with LF or CRLF."""
    with utf8(path, file_format) as stream:
        number = 0
        while line := stream.readline(LONGEST):
            number += 1
            if len(line) == LONGEST:
                raise UserError(f"{path}:{number}: the line is longer than {LONGEST >> 20} MiB")
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.isspace():
                check_utf8(line, path, number)
                yield f"{path}:{number}", _parsed(line, f"{path}:{number}")


def _parsed(line: bytes, where: str):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: invalid JSON: {getattr(error, 'msg', error)}") from None


def json_array(path, file_format: FileFormat, *fields: str, option: str = "") -> Iterator[tuple[str, object]]:
    """The elements of a JSON array, parsed one by one."""
    with utf8(path, file_format) as stream:
        yield from _Values(stream, path).elements()


def json_objects(path, file_format: FileFormat, *fields: str, option: str = "") -> Iterator[tuple[str, object]]:
    """JSON values with or without spaces and line breaks between them, and in them."""
    with utf8(path, file_format) as stream:
        yield from _Values(stream, path).values()


class _Values:
    """Parses JSON values from a stream. text[at:] was read and is not parsed yet; text[at] is on `line`."""

    def __init__(self, stream: BinaryIO, path):
        self.stream = stream
        self.path = path
        self.text = ""
        self.at = 0
        self.line = 1
        self.ended = False
        self.utf8 = codecs.getincrementaldecoder("utf-8-sig")()

    def elements(self) -> Iterator[tuple[str, object]]:
        self._take("[", "Expecting '['")
        last = self._next() == "]"
        while not last:
            self._next()  # so that the line is that of the element's beginning
            yield f"{self.path}:{self.line}", self._value()
            last = self._next() != ","
            if not last:
                self._take(",", "")
        self._take("]", "Expecting ',' delimiter")
        if self._next():
            raise self._invalid("Extra data")

    def values(self) -> Iterator[tuple[str, object]]:
        while self._next():
            yield f"{self.path}:{self.line}", self._value()

    def _value(self):
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # otherwise a number may go on
                    self._go(end)
                    return value
            except RecursionError as error:
                raise self._invalid(str(error)) from None
            except ValueError as error:
                if self.ended:
                    raise self._invalid(getattr(error, "msg", str(error))) from None
            left = len(self.text) - self.at
            if left > LONGEST:
                raise self._invalid(f"an element does not end within {LONGEST >> 20} MiB")
            self._read(left)  # as much again: what is parsed from its beginning stays linear in all

    def _next(self) -> str:
        """Moves to the next character that is no space, and returns it; '' at the end."""
        while True:
            spaces = _SPACES.match(self.text, self.at)
            assert spaces, "it matches no space, too"
            self._go(spaces.end())
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read()

    def _take(self, character: str, message: str) -> None:
        if self._next() != character:
            raise self._invalid(message)
        self._go(self.at + 1)

    def _go(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _read(self, least: int = 0) -> None:
        content = self.stream.read(max(least, _CHUNK))
        self.ended = not content
        try:
            self.text = self.text[self.at :] + self.utf8.decode(content, self.ended)
        except UnicodeDecodeError as error:
            self.line += self.text.count("\n", self.at) + error.object.count(b"\n", 0, error.start)
            raise not_utf8(f"{self.path}:{self.line}", error.object[error.start], error.reason) from None
        self.at = 0

    def _invalid(self, message: str) -> UserError:
        return UserError(f"{self.path}:{self.line}: invalid JSON: {message}")


def table(path, file_format: FileFormat, *fields: str, option: str = TEXT_FIELD) -> Iterator[tuple[str, object]]:
    """The rows of a CSV or TSV file, whose form is found (table_form.py). The first row names the columns; all must have as
    many values. If fields are numbers, the file has no row of names, and columns are numbered from 1."""
    numbered = all(field.isdecimal() for field in fields)
    form = _form(path, file_format, named=not numbered)
    limit = csv.field_size_limit(LONGEST)
    try:
        with utf8(path, file_format) as stream:
            lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
            if form.stated:
                lines.readline()
            reader = csv.reader(lines, delimiter=form.separator, strict=True, quoting=form.quoting)
            first = next(reader, [])
            columns = [str(number + 1) for number in range(len(first))] if numbered else first
            _check_header(path, f"{path}:{form.stated + 1}", fields, columns, option)
            for row in chain([first] if numbered else [], reader):
                where = f"{path}:{form.stated + reader.line_num}"
                if row and len(row) != len(columns):
                    size = f"the row has {len(row)} values, separated by {form.separator!r}"
                    raise UserError(f"{where}: {size}; the first one has {len(columns)}")
                form.check(row, where)
                if row:
                    yield where, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        where, kind = f"{path}:{form.stated + reader.line_num}", file_format.kind.upper()
        raise UserError(f"{where}: not a valid {kind} row: {error}") from None
    except UnicodeDecodeError:
        _check_lines(path, file_format)
        raise
    finally:
        csv.field_size_limit(limit)


def _form(path, file_format: FileFormat, named: bool) -> Form:
    with utf8(path, file_format) as stream:
        head = stream.read(HEAD)
    return form_of(head.decode("utf-8-sig", "replace"), len(head) < HEAD, file_format.kind, named)


def _check_header(path, where: str, fields: tuple[str, ...], columns: list[str], option: str) -> None:
    if len(columns) == 1 and set(fields) - set(columns):
        missing = next(field for field in fields if field not in columns)
        raise UserError(f"{where}: no field {missing!r}; the only one is {_listed(columns)}: {WORDS} ({option})")
    _check_columns(path, where, fields, columns, option)


def _check_lines(path, file_format: FileFormat) -> None:
    """Raises UserError with the line of the first byte of a file that is not UTF-8."""
    with utf8(path, file_format) as stream:
        for number, line in enumerate(iter(partial(stream.readline, LONGEST), b""), 1):
            check_utf8(line, path, number)


def columns(path, file_format: FileFormat, *fields: str, option: str = TEXT_FIELD) -> Iterator[tuple[str, object]]:
    """The rows of a file of columns, with these columns. Raises UserError for a compressed one: it is not a
    stream; and for one that grows to more than compression.py allows: a few bytes of a column may stand for any number of
    rows."""
    kind, number = file_format.kind, 0
    if file_format.compression:
        raise UserError(f"{path}: {kind}, compressed with {file_format.compression}: decompress it first")
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
    most = left = max(FREE, RATIO * size)
    try:
        for part in _parts(path, kind, size, fields, option):
            left -= part.nbytes + _ROW * len(part)
            if left < 0:
                much = f"its rows take more than {most:,} bytes, which is {RATIO} times its size or more"
                raise UserError(f"{path}: {much}: write it as JSON lines")
            for texts in zip(*map(_texts, part.columns), strict=True):
                yield f"{path}, row {number}", dict(zip(fields, texts, strict=True))
                number += 1
    except confined.Exceeded as error:
        raise UserError(f"{path}: after row {number}, {error}: write it in smaller parts, or as JSON lines") from None
    except (confined.Failed, UnicodeDecodeError) as error:
        raise UserError(f"{path}: a damaged {kind} file, after row {number}: {error}") from None


def _parts(path, kind: str, size: int, fields: tuple[str, ...], option: str) -> Iterator:
    """The rows of a file of `size` bytes in parts, as RecordBatches. Raises UserError for columns without text."""
    from pyarrow import ipc

    request = json.dumps({"path": os.path.realpath(path), "kind": kind, "fields": fields}).encode()
    limits = _SECONDS + size // _PER_SECOND, _MEMORY + 4 * size
    answer = confined.ask("xfresearch.data.arrow_columns", request, *limits)
    types = json.loads(next(answer))
    _check_columns(path, path, fields, [name for name, _ in types], option)
    for field in fields:
        if other := dict(types)[field]:
            raise UserError(f"{path}: column {field!r} is {other}; it must be a string ({option})")
    for content in answer:
        yield from ipc.open_stream(content)


def _texts(column) -> list[str | None]:
    values = column.to_pylist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def _check_columns(path, where: str, fields: tuple[str, ...], names: list[str], option: str) -> None:
    for field in fields:
        if names.count(field) != 1:
            twice = UserError(f"{path}: two columns are named {field!r}")
            raise twice if field in names else no_field(where, field, names, option)


READERS: dict[str, Callable[..., Iterator[tuple[str, object]]]] = {
    "json lines": json_lines,
    "json array": json_array,
    "json objects": json_objects,
    "csv": table,
    "tsv": table,
    **dict.fromkeys(FORMATS, columns),
}
_KINDS = ["JSON lines", "a JSON array", "CSV", "TSV", *(each.words for each in FORMATS.values())]
READABLE = f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
