"""Columns of parquet and arrow: a few bytes can stand for any number of rows, or for one of any length."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from xfresearch.data import rows
from xfresearch.data.corpus_files import read_documents
from xfresearch.runtime.errors import UserError

MIB = 1 << 20
TOO_MANY = r"its rows take more than [\d,]+ bytes, which is 200 times its size or more: write it as JSON lines$"
TOO_LARGE = "after row 0, it takes more than 3 s of processor time or 128 MiB of memory: write it in smaller parts"


def repeated(text: str, count: int, index=np.int32) -> pa.Array:
    """A dictionary column with one entry."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, index)), pa.array([text]))


def views(text: str, count: int) -> pa.Array:
    """A column of views, all of the same text."""
    view = np.zeros((count, 4), np.int32)
    view[:, 0], view[:, 1] = len(text), int.from_bytes(text[:4].encode(), "little")
    return pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(view), pa.py_buffer(text.encode())])


def write(path, column, **options) -> None:
    table = pa.table({"text": column})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, compression="zstd", write_statistics=False, store_schema=False, **options)
        return
    with ipc.new_file(path, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table)


plain, large = {"use_dictionary": False}, {"dictionary_pagesize_limit": 1 << 30}
BOMBS = {
    "a long entry of a dictionary": ("a.parquet", lambda: repeated("a" * 3 * MIB, 2000), large, TOO_MANY),
    "many short rows": ("a.parquet", lambda: repeated("ab", 3_000_000), {"row_group_size": 1 << 23}, TOO_MANY),
    "a page of 150 MiB": ("a.parquet", lambda: pa.array(["a" * 150 * MIB], pa.large_string()), plain, TOO_LARGE),
    "rows that repeat the one before": (
        "a.parquet", lambda: pa.array(["a" * MIB] * 100),
        plain | {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, TOO_MANY,
    ),
    "a long list in a row": ("a.parquet", lambda: pa.array([["a"] * 3_000_000]), {}, "it must be a string"),
    "a dictionary of arrow": ("a.arrow", lambda: repeated("a" * MIB, 1_000_000, np.int8), {}, TOO_MANY),
    "views of one text": ("a.arrow", lambda: views("a" * MIB, 100_000), {}, TOO_MANY),
    "a compressed buffer": ("a.arrow", lambda: pa.array(["a" * 150 * MIB], pa.large_string()), {}, TOO_LARGE),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_cannot_fill_the_memory(tmp_path, monkeypatch, bomb):
    monkeypatch.setattr(rows, "_MEMORY", 128 * MIB)  # a quarter, so that the tests are fast
    monkeypatch.setattr(rows, "FREE", 64 * MIB)
    name, column, options, message = BOMBS[bomb]
    write(tmp_path / name, column(), **options)
    assert (tmp_path / name).stat().st_size < MIB
    with pytest.raises(UserError, match=rf"^{tmp_path}/[^\n]*{message}[^\n]*$"):
        for _ in read_documents(tmp_path / name, "text"):
            pass


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_kind_of_text_is_read(tmp_path, name, kind):
    texts = [f"text {number % 700} \u00e9" for number in range(2000)]
    write(tmp_path / name, pa.array(texts).cast(kind))
    assert [text.decode() for text in read_documents(tmp_path / name, "text")] == texts


def test_rows_that_do_not_fit_together_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_MEMORY", 64 * MIB)
    texts = [chr(97 + number % 26) * (MIB if number > 10 else 10) for number in range(100)]
    write(tmp_path / "a.parquet", pa.array(texts), use_dictionary=False, write_batch_size=4)
    assert list(read_documents(tmp_path / "a.parquet", "text")) == [text.encode() for text in texts]


def test_text_that_is_not_utf8_and_a_file_that_vanished(tmp_path):
    write(tmp_path / "a.parquet", pa.array([b"a", b"\xff"]))
    with pytest.raises(UserError, match="a damaged parquet file, after row 0: .*invalid start byte"):
        list(read_documents(tmp_path / "a.parquet", "text"))
