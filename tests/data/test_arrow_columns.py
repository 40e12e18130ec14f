"""Files of columns, every format with the same tests. A few bytes can stand for any number of rows, or for a long one."""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, orc, parquet

from xfresearch.data import rows
from xfresearch.data.column_formats import FORMATS
from xfresearch.data.corpus_files import ROW_SUFFIXES, read_documents
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.formats import sniff

MIB = 1 << 20
TOO_MANY = r"its rows take more than [\d,]+ bytes, which is 200 times its size or more: write it as JSON lines$"
TOO_LARGE = "after row 0, it takes more than 3 s of processor time or 144 MiB of memory: write it in smaller parts"
KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def repeated(text: str, count: int, index=np.int32) -> pa.Array:
    """A dictionary column with one entry."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, index)), pa.array([text]))


def views(text: str, count: int) -> pa.Array:
    """A column of views, all of the same text."""
    view = np.zeros((count, 4), np.int32)
    view[:, 0], view[:, 1] = len(text), int.from_bytes(text[:4].encode(), "little")
    return pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(view), pa.py_buffer(text.encode())])


def write_parquet(path, table: pa.Table, **options) -> None:
    parquet.write_table(table, path, compression="zstd", write_statistics=False, store_schema=False, **options)


def write_arrow(path, table: pa.Table, new=ipc.new_file) -> None:
    with new(path, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table, max_chunksize=500)


def write_arrow_stream(path, table: pa.Table) -> None:
    write_arrow(path, table, ipc.new_stream)


def write_orc(path, table: pa.Table) -> None:
    """Without compression a stripe ends after some hundred rows of the tests; equal texts are small in a dictionary."""
    orc.write_table(table, path, dictionary_key_size_threshold=0.5, stripe_size=1 << 10, batch_size=100)


class Writer(NamedTuple):
    write: Callable
    kinds: list[pa.DataType]  # of texts that the format has
    nested: bool = True  # it has columns in columns
    compressed: bool = True


WRITERS = {
    "parquet": Writer(write_parquet, KINDS),
    "arrow": Writer(write_arrow, KINDS),
    "arrow stream": Writer(write_arrow_stream, KINDS),
    "orc": Writer(write_orc, KINDS[:3]),
}
plain, large = {"use_dictionary": False}, {"dictionary_pagesize_limit": 1 << 30}
BOMBS = {
    "a long entry of a dictionary": ("parquet", lambda: repeated("a" * 3 * MIB, 2000), large, TOO_MANY),
    "many short rows": ("parquet", lambda: repeated("ab", 3_000_000), {"row_group_size": 1 << 23}, TOO_MANY),
    "a page of 150 MiB": ("parquet", lambda: pa.array(["a" * 150 * MIB], pa.large_string()), plain, TOO_LARGE),
    "rows that repeat the one before": (
        "parquet", lambda: pa.array(["a" * MIB] * 100),
        plain | {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, TOO_MANY,
    ),
    "a long list in a row": ("parquet", lambda: pa.array([["a"] * 3_000_000]), {}, "it must be a string"),
    "a dictionary of arrow": ("arrow", lambda: repeated("a" * MIB, 1_000_000, np.int8), {}, TOO_MANY),
    "views of one text": ("arrow", lambda: views("a" * MIB, 100_000), {}, TOO_MANY),
    "a compressed buffer": ("arrow", lambda: pa.array(["a" * 150 * MIB], pa.large_string()), {}, TOO_LARGE),
}  # fmt: skip


def write(path, format: str, column, **options) -> list[bytes]:
    """Reads back what is written."""
    WRITERS[format].write(path, pa.table({"n": range(len(column)), "text": column}), **options)
    return list(read_documents(path, "text"))


def test_every_format_has_these_tests():
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_cannot_fill_the_memory(tmp_path, monkeypatch, bomb):
    monkeypatch.setattr(rows, "_MEMORY", 144 * MIB)  # a quarter, so that the tests are fast, and 16 for the libraries
    monkeypatch.setattr(rows, "FREE", 64 * MIB)
    format, column, options, message = BOMBS[bomb]
    WRITERS[format].write(tmp_path / "a", pa.table({"text": column()}), **options)
    assert (tmp_path / "a").stat().st_size < MIB
    with pytest.raises(UserError, match=rf"^{tmp_path}/[^\n]*{message}[^\n]*$"):
        for _ in read_documents(tmp_path / "a", "text"):
            pass


@pytest.mark.parametrize("format", [format for format, writer in WRITERS.items() if writer.compressed])
def test_a_small_file_of_each_format_cannot_fill_the_memory(tmp_path, monkeypatch, format):
    monkeypatch.setattr(rows, "_MEMORY", 128 * MIB)
    monkeypatch.setattr(rows, "FREE", 64 * MIB)
    monkeypatch.setattr(rows, "RATIO", 20)
    with pytest.raises(UserError, match=rf"^{tmp_path}/[^\n]*(times its size or more|128 MiB of memory)[^\n]*$"):
        write(tmp_path / "a", format, pa.array(["a" * 1000] * 150_000))


@pytest.mark.parametrize("format, kind", [(format, kind) for format in WRITERS for kind in WRITERS[format].kinds])
def test_every_kind_of_text_is_read(tmp_path, format, kind):
    texts = [f"text {number % 700} \u00e9" for number in range(2000)]
    assert [text.decode() for text in write(tmp_path / "a", format, pa.array(texts).cast(kind))] == texts
    assert sniff(tmp_path / "a").kind == format and set(FORMATS[format].suffixes) <= set(ROW_SUFFIXES)


@pytest.mark.parametrize("format", WRITERS)
def test_a_column_is_chosen_by_name_and_refused_by_name(tmp_path, format):
    write(tmp_path / "a", format, pa.array(["a", "b"]))
    for field, message in {"n": "column 'n' is int64; it must be", "txt": "no field 'txt'; .*: n, text; did"}.items():
        with pytest.raises(UserError, match=message):
            list(read_documents(tmp_path / "a", field))
    WRITERS[format].write(tmp_path / "a", pa.table({"text": ["a", None], "a.c": ["b", "c"]}))
    assert list(read_documents(tmp_path / "a", "a.c")) == [b"b", b"c"]
    with pytest.raises(UserError, match="row 1: field 'text' is null"):
        list(read_documents(tmp_path / "a", "text"))


@pytest.mark.parametrize("format", [format for format, writer in WRITERS.items() if writer.nested])
def test_a_column_in_a_column_has_the_names_of_both(tmp_path, format):
    values = [{"a": {"b": "inner", "c": {"d": "deep"}}, "a.c": "plain"}, {"a": None, "a.c": "plain"}]
    WRITERS[format].write(tmp_path / "a", pa.Table.from_pylist(values))
    assert list(read_documents(tmp_path / "a", "a.c")) == [b"plain", b"plain"]
    for field in ("a.b", "a.c.d"):
        with pytest.raises(UserError, match=f"row 1: field '{field}' is null"):
            list(read_documents(tmp_path / "a", field))
    with pytest.raises(UserError, match="no field 'a.cd'; fields present: a.b, a.c.d, a.c; did you mean"):
        list(read_documents(tmp_path / "a", "a.cd"))


@pytest.mark.parametrize("format", WRITERS)
def test_a_file_that_was_damaged_is_read_or_refused_in_one_line(tmp_path, format):
    draw, path = random.Random(0), tmp_path / "a"
    texts = write(path, format, pa.array([f"text {number}" for number in range(300)]))
    content, refused = path.read_bytes(), 0
    for _ in range(20):
        damaged = bytearray(content[: draw.choice([len(content), draw.randrange(20, len(content))])])
        for _ in range(draw.randrange(1, 6)):
            damaged[draw.randrange(12, len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            assert len(list(read_documents(path, "text"))) <= len(texts)
        except UserError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert refused


def test_rows_that_do_not_fit_together_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_MEMORY", 64 * MIB)
    texts = [chr(97 + number % 26) * (MIB if number > 10 else 10) for number in range(100)]
    read = write(tmp_path / "a", "parquet", pa.array(texts), use_dictionary=False, write_batch_size=4)
    assert read == [text.encode() for text in texts]


def test_text_that_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match="a damaged parquet file, after row 0: .*invalid start byte"):
        write(tmp_path / "a", "parquet", pa.array([b"a", b"\xff"]))
