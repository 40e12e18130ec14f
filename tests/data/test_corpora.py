import gzip
import hashlib
import json
import lzma
import os
import re
import zipfile

import pytest

from tests.data.conftest import shared
from xfresearch.data import text_sources
from xfresearch.data.corpora import documents, open_corpus, splits
from xfresearch.data.download import Published
from xfresearch.options.run_options import DataConfig

SPLITS = ("train", "validation", "test")


def all_documents(corpus, data):
    return {split: list(documents(corpus, split, data)) for split in splits(corpus, data)}


def test_stdlib_has_no_duplicates_and_is_split_by_path(stdlib_cache):
    result = all_documents("python_stdlib", DataConfig(cache_dir=stdlib_cache))
    everything = [text for split in SPLITS for text in result[split]]
    assert len(everything) == len(set(everything)) > 400
    assert sum(map(len, everything)) > 8_000_000
    assert all(0.02 < len(result[split]) / len(everything) < 0.08 for split in ("validation", "test"))
    root = text_sources.PythonStdlib().root
    assert (root / "argparse.py").read_bytes() in result[text_sources.split_of(b"argparse.py")]


def test_stdlib_skips_what_is_not_utf8(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "ascii_but_latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = 1\n")
    (tmp_path / "broken.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "good.py").write_bytes("x = 'é'\n".encode())
    assert [name for name in sorted(p.name for p in tmp_path.iterdir()) if text_sources._python_source(tmp_path / name)] == [
        "good.py"
    ]


def test_text_files_reads_every_format(tmp_path, text_dir):
    lines = "".join(json.dumps({"body": f"line {i} é\n"}) + "\n" for i in range(300))
    packed = "".join(json.dumps({"body": f"packed {i}"}) + "\n\n" for i in range(300))
    corpus = text_dir({
        "a.txt": "plain", "b.md": "mark", "sub/c.py": "x = 1", "d.txt.gz": gzip.compress(b"zipped"),
        "e.txt.xz": lzma.compress(b"xzed"), "f.jsonl": lines, "g.jsonl.gz": gzip.compress(packed.encode()),
        "ignored.bin": b"\xff", ".hidden.txt": "no", "pkg/__init__.py": "",
    })  # fmt: skip
    result = all_documents(corpus, DataConfig(text_field="body", cache_dir=str(tmp_path / "cache")))
    expected = [b"plain", b"mark", b"x = 1", b"zipped", b"xzed"]
    expected += [f"line {i} é\n".encode() for i in range(300)] + [f"packed {i}".encode() for i in range(300)]
    assert sorted(sum(result.values(), [])) == sorted(expected)
    assert len(result["train"]) > 500 and result["validation"] and result["test"]


def test_text_files_glob_and_split_are_stable_when_files_are_added(tmp_path, text_dir):
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    files = {f"{i}.txt": f"document {i}" for i in range(200)}
    text_dir(files)
    text_dir({"note.rst": "not in the glob"})
    glob = f"text_files:{tmp_path}/texts/*.txt"
    before = all_documents(glob, data)
    assert sum(map(len, before.values())) == 200
    text_dir({f"{i}.txt": f"document {i}" for i in range(200, 300)})
    after = all_documents(glob, data)
    assert all(set(before[split]) <= set(after[split]) for split in SPLITS)


@pytest.mark.parametrize("path", ["texts", "texts/a.txt", "texts/*.txt"])
def test_an_existing_path_is_the_corpus_of_its_text_files(tmp_path, text_dir, monkeypatch, path):
    text_dir({"a.txt": "a line\n" * 100})
    monkeypatch.chdir(tmp_path)
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    for corpus in (path, f"{tmp_path}/{path}"):
        assert open_corpus(corpus, data).identity() == open_corpus(f"text_files:{corpus}", data).identity()
        assert all_documents(corpus, data) == all_documents(f"text_files:{corpus}", data)


def test_a_built_in_name_is_never_a_path_and_a_path_may_have_a_colon(tmp_path, text_dir, monkeypatch):
    text_dir({"python_stdlib/a.txt": "a line", "c4:3.1.0": "a line"})
    monkeypatch.chdir(tmp_path / "texts")
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    assert open_corpus("python_stdlib", data).name == "python_stdlib"
    assert open_corpus("c4:3.1.0", data).name == "text_files"


def test_changed_file_of_the_same_size_is_read_again(tmp_path, text_dir):
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    corpus = text_dir({"a.txt": "old\n" * 50})
    assert b"old" in next(documents(corpus, "train", data))
    text_dir({"a.txt": "new\n" * 50})
    os.utime(tmp_path / "texts" / "a.txt", ns=(1, 1))
    assert b"new" in next(documents(corpus, "train", data))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_documents_still_fill_every_split(tmp_path, text_dir, count):
    corpus = text_dir({f"{i}.txt": f"line of {i}\n" * 100 for i in range(count)})
    result = all_documents(corpus, DataConfig(cache_dir=str(tmp_path / "cache")))
    assert all(result[split] for split in SPLITS)
    assert sum(len(text) for split in SPLITS for text in result[split]) == count * 1000


def test_one_file_is_cut_at_line_ends(tmp_path, text_dir):
    text = "".join(f"line {i} é\n" for i in range(1000)).encode()
    result = all_documents(text_dir({"a.txt": text}), DataConfig(cache_dir=str(tmp_path / "cache")))
    assert [len(result[split]) for split in SPLITS] == [1, 1, 1]
    assert b"".join(result[split][0] for split in SPLITS) == text
    assert all(result[split][0].endswith(b"\n") for split in SPLITS)
    assert len(result["train"][0]) / len(text) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("text", ["é" * 1001, "a\n" + "b" * 999, "x" * 60])
def test_text_without_line_ends_is_cut_at_characters(text):
    parts = text_sources.cut_at_lines(text.encode())
    assert "".join(part.decode() for part in parts.values()) == text
    assert (
        len(parts["train"]) / len(text.encode()) == pytest.approx(0.9, abs=0.03)
        and parts["validation"]
        and parts["test"]
    )


def test_long_document_is_stored_in_pieces_and_comes_back_whole(tmp_path, text_dir):
    text = "0123456789abcdé\n".encode() * 200_000
    result = all_documents(text_dir({"a.txt": text}), DataConfig(cache_dir=str(tmp_path / "cache")))
    assert b"".join(result[split][0] for split in SPLITS) == text and len(result["train"]) == 1


def test_wikitext2_is_byte_exact_in_both_packings(tmp_path):
    directory = shared("wikitext2")
    for packing, counts in (("stream", (1, 1, 1)), ("documents", (600, 60, 60))):
        data = DataConfig(manual_dir=str(directory), packing=packing, cache_dir=str(tmp_path / "cache"))
        for split, name, count in zip(SPLITS, ("train", "valid", "test"), counts, strict=True):
            result = list(documents("wikitext2", split, data))
            assert b"".join(result) == (directory / f"wiki.{name}.tokens").read_bytes()
            assert abs(len(result) - count) <= count // 20
    assert result[1].startswith(b" = ") and re.match(rb" = [^=]+ = \n", result[1])


def fake_hutter(monkeypatch, name: str, content: bytes):
    checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
    published = Published(name, f"https://mattmahoney.net/dc/{name}.zip", name, checksum)
    monkeypatch.setitem(text_sources.HutterPrize.files, name, published)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_enwik8_and_text8_keep_every_byte(tmp_path, monkeypatch, name, zipped):
    content = "éàü".encode() * 50 + b"x"  # 301 bytes: the cuts at 270 and 285 split characters
    fake_hutter(monkeypatch, name, content)
    if zipped:
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(name, content)
    else:
        (tmp_path / name).write_bytes(content)
    result = all_documents(name, DataConfig(manual_dir=str(tmp_path), cache_dir=str(tmp_path / "cache")))
    assert [len(result[split]) for split in SPLITS] == [1, 1, 1]
    assert (
        result["train"][0] == content[:270]
        and result["validation"][0] == content[270:285]
        and result["test"][0] == content[285:]
    )


@pytest.fixture
def tfds_corpus(tmp_path):
    """A TFDS data set with a train split only, prepared in its own data_dir."""
    from tests.data.tiny_tfds import TinyTfds

    builder = TinyTfds(data_dir=str(tmp_path / "tfds"), file_format="array_record")
    builder.download_and_prepare()
    return f"tiny_tfds:{tmp_path / 'tfds'}"


def test_other_tfds_data_set_gets_a_validation_split(tmp_path, tfds_corpus):
    data = DataConfig(text_field="content", cache_dir=str(tmp_path / "cache"))
    assert splits(tfds_corpus, data) == ("train", "validation")
    train, validation = (list(documents(tfds_corpus, split, data)) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(f"text {i}".encode() for i in range(400))
    assert 5 <= len(validation) <= 40 and validation == list(documents(tfds_corpus, "validation", data))


def test_other_tfds_data_set_is_prepared_if_necessary(tmp_path):
    from tests.data.tiny_tfds import TinyTfds  # noqa: F401  (the import registers it)

    data = DataConfig(text_field="content", cache_dir=str(tmp_path / "cache"))
    assert len(list(documents(f"tiny_tfds:{tmp_path / 'fresh'}", "train", data))) > 300
    assert len(list(documents(f"tiny_tfds:1.0.0:{tmp_path / 'fresh'}", "train", data))) > 300
