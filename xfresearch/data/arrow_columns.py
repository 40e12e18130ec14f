"""Decodes columns of the files of column_formats.py, in a child process of confined.py: pyarrow has no limits of its own.

A few bytes of these formats can stand for any number of rows, or for one of any length. A request is JSON: the path, the
kind of file (formats.py), the columns. The answer is [[column, its type if it is no text, else ""], ...] for all columns,
and then the rows, as streams of arrow of at most ROWS rows.
"""

import json
import os
from collections.abc import Iterator

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others reserve a gigabyte of addresses, and keep what was freed
import pyarrow
from pyarrow import DictionaryArray, compute, ipc, large_binary, large_string, record_batch, types

from xfresearch.data.column_formats import FORMATS, ROWS
from xfresearch.runtime.opening import name_of, open_to_read

_PART = 1 << 24  # bytes of the rows of a dictionary, or of views, that are copied at once


def answers(request: bytes) -> Iterator[bytes | memoryview]:
    pyarrow.set_cpu_count(1)  # each thread reserves addresses
    pyarrow.set_io_thread_count(1)
    asked = json.loads(request)
    with open_to_read(asked["path"]) as file:
        decoded = FORMATS[asked["kind"]].decode(name_of(file), asked["fields"])
        schema = next(decoded)
        yield json.dumps([[name, "" if _is_text(kind) else str(kind)] for name, kind in _leaves(schema)]).encode()
        for batch in decoded:
            yield from map(_stream, _parts([_column(batch, field) for field in asked["fields"]]))


def _leaves(fields) -> list:
    """(name, type) of the columns of a schema; of one with columns in it, these: 'translation.en'."""
    inner = [(each, _leaves(each.type) if types.is_struct(each.type) else []) for each in fields]
    return [leaf for each, below in inner for leaf in (
        [(f"{each.name}.{name}", kind) for name, kind in below] or [(each.name, each.type)])]  # fmt: skip


def _column(batch, field: str):
    """A column, or one in a column of structs."""
    name, *below = [field] if field in batch.schema.names else field.split(".")
    column = batch.column(name)
    if below:
        column.validate(full=True)
    return compute.struct_field(column, below) if below else column


def _parts(batch: list) -> Iterator:
    """The columns of a batch in parts, as plain ones. A row of a dictionary, or of views, takes a few bytes here, and as a
    text as many as it has: so long rows are copied a few at a time."""
    columns = []
    for column in batch:  # of a damaged arrow file, offsets may lead out of its buffers
        if types.is_dictionary(column.type):
            column.validate(full=True)
            column = DictionaryArray.from_arrays(column.indices, column.dictionary.cast(large_binary()))
        columns.append(column)
    rows = max(1, min(ROWS, _PART // max(map(_longest, columns))))
    for start in range(0, len(batch[0]), rows):
        parts = [column.slice(start, rows) for column in columns]
        for part in parts:
            if not types.is_dictionary(part.type):
                part.validate(full=True)
        plain = [part.cast(large_string() if types.is_string(part.type) else large_binary()) for part in parts]
        yield record_batch(plain, names=[str(number) for number in range(len(plain))])


def _longest(column) -> int:
    """Bytes of the longest row of a column, at least 1; 1 for a plain column, which is in memory as it is."""
    if types.is_dictionary(column.type):
        return compute.max(compute.binary_length(column.dictionary)).as_py() or 1
    if not types.is_string_view(column.type) or not len(column):
        return 1
    column.validate()
    views = memoryview(column.buffers()[1]).cast("i")  # four numbers for each row, of which the first is its length
    return max(1, *views[4 * column.offset : 4 * (column.offset + len(column)) : 4])


def _is_text(kind) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view,
                                       types.is_binary, types.is_large_binary, types.is_null))  # fmt: skip


def _stream(batch) -> memoryview:
    sink = pyarrow.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())
