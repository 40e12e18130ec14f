"""Formats of files of columns: a function and a line of FORMATS each. docs/adding_format.md adds one.

A function gets the name of an open file and the columns to read, which may be columns of structs ('translation.en'). It
yields the schema, then batches of rows (pyarrow.RecordBatch), which may have other columns, too. It runs in the child
process of arrow_columns.py, within the limits of confined.py, and imports its library there.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

ROWS = 256  # that are decoded at once, where a library can
_CHUNK = 1 << 20  # bytes that are read of a parquet file at once


class ColumnFormat(NamedTuple):
    decode: Callable[[str, list[str]], Iterator]
    words: str  # in messages and in docs/data.md
    suffixes: tuple[str, ...]  # of the files that are read of a directory


def _parquet(name: str, fields: list[str]) -> Iterator:
    """If a batch of long rows does not fit in memory, the rows that follow come one by one."""
    from pyarrow import parquet

    seen = 0
    for rows in (ROWS, 1):
        try:
            file = parquet.ParquetFile(name, buffer_size=_CHUNK, pre_buffer=False)
            if rows == ROWS:
                yield file.schema_arrow
            first = seen
            for number, batch in enumerate(file.iter_batches(rows, columns=fields, use_threads=False)):
                if rows * number >= first:
                    seen += len(batch)
                    yield batch
            return
        except MemoryError:
            if rows == 1:
                raise


def _arrow(name: str, fields: list[str], streamed: bool = False) -> Iterator:
    import pyarrow
    from pyarrow import ipc

    with pyarrow.OSFile(name) as file:
        reader = (ipc.open_stream if streamed else ipc.open_file)(file, options=ipc.IpcReadOptions(use_threads=False))
        yield reader.schema
        yield from reader if streamed else map(reader.get_batch, range(reader.num_record_batches))


def _orc(name: str, fields: list[str]) -> Iterator:
    """The columns of one stripe at a time: writers end it at some megabytes, 64 by default."""
    from pyarrow import orc

    file = orc.ORCFile(name)
    yield file.schema
    for number in range(file.nstripes):
        yield file.read_stripe(number, columns=fields)


FORMATS: dict[str, ColumnFormat] = {  # by the kinds of runtime/formats.py
    "parquet": ColumnFormat(_parquet, "parquet", (".parquet",)),
    "arrow": ColumnFormat(_arrow, "arrow (feather)", (".arrow",)),
    "arrow stream": ColumnFormat(partial(_arrow, streamed=True), "arrow streams (`datasets`)", (".arrow",)),
    "orc": ColumnFormat(_orc, "ORC", (".orc",)),
}
