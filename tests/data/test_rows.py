"""Files of rows: what the readers yield, where an error stands, and how much memory a long file takes."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from xfresearch.data import corpus_files, rows
from xfresearch.data.corpora import open_corpus
from xfresearch.data.corpus_files import find_files, read_documents
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.formats import sniff


def read(path, content: bytes, field: str = "text") -> list[bytes]:
    path.write_bytes(content)
    return list(read_documents(path, field))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_a_json_array_is_parsed_across_the_ends_of_what_is_read(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(rows, "_CHUNK", chunk)
    rng = random.Random(0)
    texts = ["".join(rng.choices('"\\[]{},: \n\u4e2d\U0001f409a1', k=rng.randrange(40))) for _ in range(30)]
    values = [{"text": text, "n": [1.5e10, -7, None, {"text": "inner"}]} for text in texts]
    content = json.dumps(values, ensure_ascii=bool(chunk % 2), indent=chunk % 3 or None).encode()
    assert read(tmp_path / "a.json", content) == [text.encode() for text in texts]
    written = [json.dumps(value, ensure_ascii=bool(chunk % 2), indent=chunk % 3 or None) for value in values]
    for between in ("", " ", "\n\n"):
        for name in ("b.json", "b.jsonl", "b.txt"):
            content = between.join([*written, written[0] + written[1]]).encode()
            assert read(tmp_path / name, content) == [text.encode() for text in [*texts, *texts[:2]]]


@pytest.mark.parametrize("content, place", [
    (b'[{"text": "a"},\n{"text": "b"}\n{"text": "c"}]', "3: invalid JSON: Expecting ',' delimiter"),
    (b'[{"text": "a"},\n\n{"text": }]', "3: invalid JSON: Expecting value"),
    (b'[{"text": "a"},\n12, {"text": "b"}]', "2: the line is a JSON int; it must be an object with field 'text'"),
    (b'[{"text": "a"}', "1: invalid JSON: Expecting ',' delimiter"),
    (b'[{"text": "a"}]\n\nx', "3: invalid JSON: Extra data"),
    (b'{"text": "a"} {"text": "b"}\n{"text": }', "2: invalid JSON: Expecting value"),
    (b'{\n"text": "a"\n},\n{\n"text": "b"\n}', "3: invalid JSON: Expecting value"),
    (b'{\n"text": "a"\n}\n{\n"txt": "b"\n}', "4: no field 'text'; fields present: txt; did you mean 'txt'"),
    (b"[" * 100_000, "1: invalid JSON: maximum recursion depth exceeded"),
])  # fmt: skip
def test_an_error_in_json_names_its_line(tmp_path, content, place):
    with pytest.raises(UserError) as raised:
        read(tmp_path / "a.json", content)
    assert str(raised.value).startswith(f"{tmp_path / 'a.json'}:{place}")


def test_a_row_that_never_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST", 1 << 12)
    monkeypatch.setattr(rows, "_CHUNK", 1 << 10)
    monkeypatch.setattr("xfresearch.runtime.formats.HEAD", 1 << 10)
    long = json.dumps({"text": "a" * 10_000}).encode()
    for name, content, words in (
        ("a.jsonl", long, ":1: the line is longer than 0 MiB"),
        ("a.json", b"[" + long + b"]", ":1: invalid JSON: an element does not end within 0 MiB"),
        ("a.csv", b'text\n"' + b"a" * 10_000 + b'"\n', ":2: not a valid CSV row: field larger than field limit"),
    ):
        with pytest.raises(UserError) as raised:
            read(tmp_path / name, content)
        assert words in str(raised.value)


def test_a_field_in_a_field_has_the_names_of_both(tmp_path):
    """A name with a dot in it comes first, and what is missing, or null, is named with its row."""
    values = [{"a": {"b": "inner", "c": {"d": "deep"}}, "a.c": "plain"}, {"a": None, "a.c": "plain"}]
    lines = "".join(json.dumps(row) + "\n" for row in values).encode()
    parquet.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet")
    table = (tmp_path / "a.parquet").read_bytes()
    for name, content, place in (("a.jsonl", lines, "a.jsonl:2: no field"), ("a.parquet", table, "a.parquet, row 1: field")):
        assert read(tmp_path / name, content, "a.c") == [b"plain", b"plain"]
        for field in ("a.b", "a.c.d"):
            with pytest.raises(UserError, match=f"{place} '{field}'"):
                read(tmp_path / name, content, field)
    assert read(tmp_path / "a.jsonl", lines.splitlines()[0], "a.c.d") == [b"deep"]


def test_a_long_line_is_sniffed_by_its_beginning(tmp_path):
    """As in one record of a book: its first line is longer than what is looked at."""
    text = "word " * 50_000
    content = json.dumps({"text": text}).encode()
    for name in ("a.json", "a.txt"):
        assert read(tmp_path / name, content + b"\n" + content) == [text.encode()] * 2


def test_a_directory_gives_its_text_and_rows_and_not_its_settings(tmp_path):
    files = {"a.txt": b"text", "b.jsonl.zst": b"", "c.parquet": b"", "d.json": b'[{"text": "a"}]', "e.json": b'{"a": 1}'}
    files |= {"f.json": b"version https://git-lfs.github.com/spec/v1\n", "g.bin": b"", "h.ndjson.gz": b"", "i.csv": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    listed = [path.name for path in find_files(str(tmp_path), "")]
    assert listed == ["a.txt", "b.jsonl.zst", "c.parquet", "d.json", "f.json", "h.ndjson.gz", "i.csv"]


@pytest.mark.parametrize("content, name, kind", [
    ((b"{" + b'"a": 1, ' * 9_000 + b'"b": 2}\n') * 2, "a.json", "json lines"),
    (b'{"a": "\\"weight_map\\": {"}\n' * 3, "a.json", "json lines"),
    (b'{"model_type": "llama"}\n' * 3, "a.json", "json lines"),
    (b'{\n"a": 1\n}\n' * 9_000, "a.json", "json objects"),
    (b'{\n"a": 1\n}\n' * 9_000 + b"or not", "a.txt", "json objects"),  # its reader has the line
    (b'{\n"a": 1\n}\n' * 2 + b"is how it begins", "a.txt", "text"),
    (b'{\n"a": 1\n}\n// a comment', "settings.json", "json object"),
    (b'{"model_type": 262, "architectures": 263}', "vocab.json", "json object"),
    (b"text,label\n", "a.csv.gz", "csv"),
    ("\u4e2d\u6587".encode("utf-16-le") * 9, "a.txt", "text"),
    (bytes(range(1, 32)) * 9 + b"\xff", "a.txt", "binary"),
    (b"caf\xe9", "a.txt", "text"),
    (b"ORC\x8a\x01\0\n", "a", "orc"),  # compressed
    (b"ORCHARD ORCS", "a", "text"),
    (b"\xff\xfe\0\0a\0\0\0", "a.txt", "text"),
])  # fmt: skip
def test_kinds_that_are_easily_taken_for_others(tmp_path, content, name, kind):
    (tmp_path / name).write_bytes(content)
    assert sniff(tmp_path / name).kind == kind


@pytest.mark.parametrize("size", [3, 4, 5, 1000])
def test_utf8_is_checked_across_the_ends_of_chunks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(rows, "_CHUNK", size)
    good = "a\n\u4e2d\U0001f409\n".encode() * 9
    rows.check_utf8(good, "a.txt")
    error = "a.txt:19: not UTF-8: byte 0xe4"
    for bad in (good + b"\xe4\xb8", good + b"\xe4\xb8a"):
        with pytest.raises(UserError, match=error):
            rows.check_utf8(bad, "a.txt")


def test_many_equal_documents_are_split_in_linear_time(tmp_path):
    """Their hashes are in one split, so the others are filled; the square of their number would take minutes."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100_000)
    corpus = open_corpus(str(tmp_path / "a.jsonl"), DataConfig(cache_dir=str(tmp_path / "cache")))
    assert sorted(sum(1 for _ in corpus.documents(split)) for split in corpus.splits) == [1, 1, 99_998]


# Writes 2 GB of documents in one of the forms; reads them, and prints their bytes and by how many MB the process grew.
LARGE = """
import json, resource, sys
import pyarrow as pa
from pyarrow import parquet
from pathlib import Path
path, total = Path(sys.argv[1]), int(sys.argv[2])
text = "".join(chr(97 + (n * n) % 26) for n in range(1000))
def write():
    if path.suffix == ".parquet":
        schema = pa.schema([("text", pa.string())])
        with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
            for _ in range(total // 100_000_000):
                writer.write_table(pa.table({"text": [text] * 100_000}, schema))
        return
    if path.suffix == ".txt":
        with path.open("wb") as file:
            for _ in range(total // 1_000_000):
                file.write((text[1:] + "\\n").encode() * 1000)
        return
    row = json.dumps({"text": text}).encode()
    first, between, last = (b"[", b",\\n", b"]") if ".json." in path.name else (b"", b"\\n", b"\\n")
    with pa.CompressedOutputStream(str(path), {".gz": "gzip", ".zst": "zstd"}[path.suffix]) as file:
        file.write(first + row)
        for _ in range(total // 1_000_000 - 1):
            file.write((between + row) * 1000)
        file.write((between + row) * 999 + last)
if len(sys.argv) == 3:
    write()
else:
    from xfresearch.data.corpora import open_corpus
    from xfresearch.options.run_options import DataConfig
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = open_corpus(str(path), DataConfig())
    read = sum(len(each) for split in corpus.splits for each in corpus.documents(split))
    print(read, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("content", [
    b"".join(b"line %d\n" % n for n in range(40)) + b"end",
    "\u4e2d\U0001f409".encode() * 40,
    b"one\n" + b"x" * 170 + b"\ntwo",
], ids=["lines", "characters", "a long line"])  # fmt: skip
def test_a_text_longer_than_the_memory_allows_is_read_in_pieces(tmp_path, monkeypatch, content):
    """Nothing is lost, no character is cut, and lines are where there are any."""
    monkeypatch.setattr(corpus_files, "LONGEST", 96)
    monkeypatch.setattr(corpus_files, "PIECE", 16)
    whole = content[:96].decode(errors="ignore").encode()
    assert read(tmp_path / "a.txt", whole) == [whole]
    pieces = read(tmp_path / "a.txt", content)
    assert b"".join(pieces) == content and len(pieces) > 4
    assert all(piece.decode() for piece in pieces)
    if content.startswith(b"line"):
        assert all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_an_error_in_a_long_text_has_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_files, "LONGEST", 96)
    monkeypatch.setattr(corpus_files, "PIECE", 16)
    with pytest.raises(UserError, match="a.txt:31: not UTF-8: byte 0xff"):
        read(tmp_path / "a.txt", b"line\n" * 30 + b"\xff\n" + b"line\n" * 9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.parquet"])
def test_a_file_of_2_gb_takes_at_most_300_mb_to_read(tmp_path, name):
    """The peak of the process that reads all splits, in MB above that of the imports."""
    total = 2_000_000_000
    for arguments in ([str(total)], [str(total), "read"]):
        command = [sys.executable, "-c", LARGE, str(tmp_path / name), *arguments]
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    read, grown = run.stdout.split()
    print(f"{name}: {float(grown):.0f} MB")
    assert int(read) == total and float(grown) < 300
