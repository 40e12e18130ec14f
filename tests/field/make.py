"""Writes the files of the table that no hand can write: python -m tests.field.make [PART OF A NAME ...]

A file that is there is written again only if it is named: the committed bytes are what is tested.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import ipc, parquet

from tests.field import models

FILES = Path(__file__).parent / "files"
# Words of several alphabets, quotes, a separator of lines that JSON does not escape, and what looks like a file's end.
TEXTS = tuple(
    f"Document {number}.\nThe caf\u00e9 by the river \u2013 \u4e2d\u6587 \u2028 sells "
    f"\"stone\", 'delta', {number} \U0001f409.\r\n\tEnd\\"
    for number in range(6)
)
ROWS = [{"id": number, "text": text, "meta": {"source": ["a", None]}} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
RAW = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=2, ensure_ascii=False).encode()
TABLE = pa.table({"id": list(range(6)), "text": list(TEXTS)})


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def _parquet(table: pa.Table, **options) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table, sink, **options)
    return sink.getvalue()


def _arrow(make: Callable, table: pa.Table = TABLE) -> bytes:
    sink = pa.BufferOutputStream()
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue().to_pybytes()


def _damaged_arrow() -> bytes:
    """The second text ends before it begins."""
    size = len(TEXTS[0].encode())
    good, bad = struct.pack("<3i", 0, size, 2 * size), struct.pack("<3i", 0, 2 * size, size)
    content = _arrow(ipc.new_stream)
    assert good in content
    return content.replace(good, bad, 1)


def _csv(separator: str, end: str = "\r\n") -> bytes:
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    return ("".join(f"{a}{separator}{b}{end}" for a, b in [("id", "text"), *enumerate(quoted)])).encode()


def _safetensors(name: str) -> bytes:
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def _zip(name: str, content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)
    return sink.getvalue()


def _tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return sink.getvalue()[:1024]


def _array_record() -> bytes:
    path = FILES / "temporary"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    content = path.read_bytes()[:1000]  # the rest is padding
    path.unlink()
    return content


def _numpy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.arange(100, dtype=np.uint16))
    return sink.getvalue()


def _written(pairs) -> bytes:
    """A TSV as a program writes it that puts values with quotation marks in quotation marks."""
    sink = io.StringIO()
    csv.writer(sink, csv.excel_tab).writerows([("en", "fr"), *pairs])
    return sink.getvalue().encode()


# Read as a quoted field, the first two rows would be one.
DIALOGUE = [('"Hello,', "Bonjour,"), ('he said."', 'dit-il."'), ('a "stone" wall', "un mur"), ("the end", "la fin")]
OPUS = [{"id": str(n), "translation": {"en": en, "fr": fr}} for n, (en, fr) in enumerate(DIALOGUE)]
PICKLE = pickle.dumps({"model": [1.0, 2.0]}, 2)
TOKENS = np.random.default_rng(0).integers(0, 50257, 1000)
JOINED = "\n\n".join(TEXTS).encode()

CONTENT: dict[str, Callable[[], bytes]] = {
    "corpora/c4-train.00000-of-01024.json.gz": lambda: gzip.compress(LINES, mtime=0),
    "corpora/gzip_members.jsonl.gz": lambda: b"".join(gzip.compress(part, mtime=0) for part in LINES.splitlines(True)),
    "corpora/pile.jsonl.zst": lambda: _zstd(LINES),
    "corpora/zst_frames.jsonl.zst": lambda: b"\x50\x2a\x4d\x18\4\0\0\0skip" + b"".join(map(_zstd, LINES.splitlines(True))),
    # As zstd --long=31 writes it: its window is 2 GB.
    "corpora/zst_window.jsonl.zst": lambda: b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(64),
    "corpora/xz_window.jsonl.xz": lambda: lzma.compress(LINES, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]),
    "corpora/zst_cut.jsonl.zst": lambda: _zstd(LINES)[:-9],
    "corpora/data.jsonl.bz2": lambda: bz2.compress(LINES),
    "corpora/data.jsonl.xz": lambda: lzma.compress(LINES[:500]) + bytes(8) + lzma.compress(LINES[500:]),
    "corpora/xz_cut.jsonl.xz": lambda: lzma.compress(LINES)[:-20],
    "corpora/named_gz_but_plain.jsonl.gz": lambda: LINES,
    "corpora/gzip_without_its_name.jsonl": lambda: gzip.compress(LINES, mtime=0),
    "corpora/twice.jsonl.gz": lambda: gzip.compress(gzip.compress(LINES, mtime=0), mtime=0),
    "corpora/data.ndjson": lambda: RAW,
    "corpora/lines.json": lambda: RAW,
    "corpora/lines.txt": lambda: RAW,
    "corpora/mark.jsonl": lambda: b"\xef\xbb\xbf" + RAW,
    "corpora/powershell.jsonl": lambda: RAW.decode().encode("utf-16"),
    "corpora/utf16_big_endian.csv": lambda: b"\xfe\xff" + _csv(",").decode().encode("utf-16-be"),
    "corpora/utf16_without_mark.jsonl": lambda: LINES.decode().encode("utf-16-le"),
    "corpora/utf16_cut.txt": lambda: JOINED.decode().encode("utf-16")[:-1],
    "corpora/utf32.txt": lambda: JOINED.decode().encode("utf-32"),
    "corpora/array.json": lambda: ARRAY,
    "corpora/array.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode(), mtime=0),
    "corpora/data.csv": lambda: _csv(","),
    "corpora/data.tsv": lambda: _csv("\t", "\n"),
    "corpora/pretty.jsonl": lambda: "".join(json.dumps(row, indent=2) + "\n" for row in ROWS).encode(),
    "corpora/one_line.txt": lambda: LINES.replace(b"\n", b" "),
    "corpora/semicolon.csv": lambda: _csv(";"),
    "corpora/tabs.csv": lambda: _csv("\t"),
    "corpora/pipe.csv.gz": lambda: gzip.compress(_csv("|"), mtime=0),
    "corpora/sep.csv": lambda: b"sep=:\r\n" + _csv(":"),
    "corpora/cp1252.csv": lambda: "id,text\r\n0,plain\r\n1,caf\u00e9 \u201cat the river\u201d\r\n".encode("cp1252"),
    "pairs/opus.jsonl": lambda: "".join(json.dumps(row) + "\n" for row in OPUS).encode(),
    "pairs/wmt.parquet": lambda: _parquet(pa.Table.from_pylist(OPUS)),
    "pairs/wmt.arrow": lambda: _arrow(ipc.new_stream, pa.Table.from_pylist(OPUS)),
    "pairs/quotes.tsv": lambda: "".join(f"{en}\t{fr}\n" for en, fr in [("en", "fr"), *DIALOGUE]).encode(),
    "pairs/numbered.tsv": lambda: "".join(f"{en}\t{fr}\n" for en, fr in DIALOGUE).encode(),
    "pairs/excel.tsv": lambda: _written(DIALOGUE),
    "corpora/data.parquet": lambda: _parquet(TABLE, row_group_size=2, compression="snappy"),
    "corpora/dictionary.parquet": lambda: _parquet(TABLE.set_column(1, "text", TABLE["text"].dictionary_encode())),
    "corpora/bytes.parquet": lambda: _parquet(TABLE.set_column(1, "text", TABLE["text"].cast(pa.binary()))),
    "corpora/tokens.parquet": lambda: _parquet(pa.table({"input_ids": [[1, 2], [3]], "text": [1, 2]})),
    "corpora/cut.parquet": lambda: _parquet(TABLE)[:-30],
    "corpora/null.parquet": lambda: _parquet(pa.table({"text": ["a", None]})),
    "corpora/two_columns.parquet": lambda: _parquet(pa.Table.from_arrays([TABLE["text"]] * 2, ["text", "text"])),
    "corpora/feather.arrow": lambda: _arrow(ipc.new_file),
    "corpora/data-00000-of-00001.arrow": lambda: _arrow(ipc.new_stream),
    "corpora/damaged.arrow": _damaged_arrow,
    "corpora/train.bin": lambda: TOKENS.astype("<u2").tobytes(),
    "corpora/bytes.bin": lambda: np.frombuffer(JOINED, np.uint8).astype("<u2").tobytes(),
    "corpora/val32.bin": lambda: TOKENS.astype("<u4").tobytes(),
    "corpora/llm_c.bin": lambda: struct.pack("<3i", 20240520, 1, 9) + bytes(1012) + TOKENS[:9].astype("<u2").tobytes(),
    "corpora/tokens.npy": _numpy,
    "corpora/records.array_record": _array_record,
    "corpora/archive.tar": _tar,
    "corpora/archive.tar.gz": lambda: gzip.compress(_tar(), mtime=0),
    "corpora/archive.zip": lambda: _zip("a.txt", b"a text"),
    "corpora/weights.txt": lambda: _safetensors("model.embed_tokens.weight"),
    "corpora/latin1.txt": lambda: "caf\u00e9 \u00e0 la carte\n".encode("latin-1") * 9,
    "corpora/nul.txt": lambda: b"a\0b\nc\n" * 9,
    "tokenizers/gzip/tokenizer.json": lambda: gzip.compress(b'{"model": {"type": "BPE"}}', mtime=0),
    "models/model.gguf": lambda: b"GGUF\3\0\0\0" + bytes(64),
    "models/ggjt.bin": lambda: b"tjgg\3\0\0\0" + bytes(64),
    "models/pytorch_model.bin": lambda: _zip("archive/data.pkl", PICKLE),
    "models/old_pytorch_model.bin": lambda: PICKLE,
    "models/model.safetensors": lambda: _safetensors("model.embed_tokens.weight"),
    "models/adapter_model.safetensors": lambda: _safetensors("base_model.model.q_proj.lora_A.weight"),
    "models/keras.h5": lambda: b"\x89HDF\r\n\x1a\n" + bytes(64),
    "models/renamed_pickle/model.safetensors": lambda: _zip("archive/data.pkl", PICKLE),
    "models/gguf_only/model.Q4_K_M.gguf": lambda: b"GGUF\3\0\0\0" + bytes(64),
    "models/flax_only/flax_model.msgpack": lambda: b"\x81\xabtransformer\x80" + bytes(9),
    "models/tensorflow/tf_model.h5": lambda: b"\x89HDF\r\n\x1a\n" + bytes(64),
    "models/onnx/onnx/model.onnx": lambda: b"\x08\x07\x12\x07pytorch",
    **models.CONTENT,
}


def main(names: list[str]) -> None:
    for name, content in CONTENT.items():
        path = FILES / name
        if not path.exists() or any(part in name for part in names):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content())
            print(path, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
