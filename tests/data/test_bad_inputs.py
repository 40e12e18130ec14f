"""Every error in the data is one line that names the file, the line and the allowed values."""

import gzip
import io
import json
import lzma
import os
import re
import urllib.error
import urllib.request
import zipfile

import pytest

from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from tests.data.test_corpora import fake_hutter, tfds_corpus  # noqa: F401  (a fixture)
from xfresearch.data.corpora import documents, splits
from xfresearch.data.pipeline import prepare
from xfresearch.data.tokenizers import hugging_face, load_tokenizer, tokenizer_for
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime import compression
from xfresearch.runtime.errors import UserError

ADVICE = "write it in UTF-8, as `iconv -f WINDOWS-1252 -t UTF-8` does for a text of Windows"
LINES = [json.dumps({"text": "fine"}), json.dumps({"text": "good"})]
BAD_FILES = {
    "empty.txt": (b"", "{file}: the file is empty"),
    "empty.jsonl": (b"", "{file}: the file is empty"),
    "latin.txt": (b"one\ntwo\ncaf\xe9 three\n", f"{{file}}:3: not UTF-8: byte 0xe9 (invalid continuation byte): {ADVICE}"),
    "latin.txt.gz": (gzip.compress(b"one\n\xff"), f"{{file}}:2: not UTF-8: byte 0xff (invalid start byte): {ADVICE}"),
    "latin.jsonl": (
        "\n".join(LINES).encode() + b'\n{"text": "\xe9"}\n',
        f"{{file}}:3: not UTF-8: byte 0xe9 (invalid continuation byte): {ADVICE}",
    ),
    "field.jsonl": (
        "\n".join([*LINES, '{"txt": "a", "id": 3}']).encode(),
        "{file}:3: no field 'text'; fields present: txt, id; did you mean 'txt'? (config.data.text_field)",
    ),
    "latin.json": (
        b'[{"text": "a"},\n' + b'{"text": "b"},\n' * 9 + b'{"text": "\xe9"}]',
        f"{{file}}:11: not UTF-8: byte 0xe9 (invalid continuation byte): {ADVICE}",
    ),
    "latin.csv": (
        b"id,text\n" + b"1,a\n" * 5_000 + b"2,\xe9\n",
        f"{{file}}:5002: not UTF-8: byte 0xe9 (invalid continuation byte): {ADVICE}",
    ),
    "number.jsonl": (b'{"text": 3}\n', "{file}:1: field 'text' is a int; it must be a string"),
    "list.jsonl": (b'["text"]\n', "{file}:1: the line is a JSON list; it must be an object with field 'text'"),
    "broken.jsonl": (
        "\n".join([*LINES, "", '{"text": "cut']).encode(),
        "{file}:4: invalid JSON: Unterminated string starting at",
    ),
    "half.jsonl": (
        b'{"text": "\\ud83d"}\n',
        "{file}:1: field 'text' holds half of a surrogate pair, which UTF-8 cannot encode",
    ),
    "cut.txt.gz": (
        gzip.compress(b"text\n" * 100)[:-6],
        "{file}: the compressed file is damaged: Compressed file ended before the end-of-stream marker was reached",
    ),
    "cut.txt.xz": (
        lzma.compress(b"text\n" * 100)[:-6],
        "{file}: the compressed file is damaged: Compressed file ended before the end-of-stream marker was reached",
    ),
}


def message(action) -> str:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def data(tmp_path):
    return lambda **fields: DataConfig(cache_dir=str(tmp_path / "cache"), **fields)


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(tmp_path, data, name):
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    result = message(lambda: list(documents(f"text_files:{tmp_path / name}", "train", data())))
    assert result == expected.format(file=tmp_path / name)


def test_bad_file_in_a_directory_is_named(tmp_path, data, text_dir):
    corpus = text_dir({"a.txt": "fine", "b/c.txt": b"bad \xff"})
    result = message(lambda: list(documents(corpus, "train", data())))
    assert result == f"{tmp_path}/texts/b/c.txt:1: not UTF-8: byte 0xff (invalid start byte): {ADVICE}"


@pytest.mark.parametrize("path", ["missing.txt", "*.txt", "empty_directory"])
def test_no_file_matches(tmp_path, data, path):
    (tmp_path / "empty_directory").mkdir()
    result = message(lambda: splits(f"text_files:{tmp_path / path}", data()))
    assert result.startswith(f"corpus 'text_files:{tmp_path / path}': no file matches '{tmp_path / path}'; it must be ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_file_without_permission(tmp_path, data):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    result = message(lambda: list(documents(f"text_files:{tmp_path / 'a.txt'}", "train", data())))
    assert result == f"{tmp_path / 'a.txt'}: cannot be read: Permission denied"


def test_file_that_cannot_be_opened(tmp_path, data, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compression, "open_to_read", refuse)
    result = message(lambda: list(documents(f"text_files:{tmp_path / 'a.txt'}", "train", data())))
    assert result == f"{tmp_path / 'a.txt'}: cannot be read: Permission denied"


@pytest.mark.parametrize("corpus, expected", [
    ("wikitxt2", "unknown corpus 'wikitxt2'; it must be python_stdlib, text_files, tokens, facts, wikitext2, enwik8, text8,"
     " a TFDS data set or an existing path; did you mean 'wikitext2'?"),
    *((path, f"unknown corpus '{path}'; it must be python_stdlib, text_files, tokens, facts, wikitext2, enwik8, text8,"
       " a TFDS data set or an existing path; there is no such file or directory either")
      for path in ("missing.txt", "missing/notes", "~/missing", "missing/*.txt")),
    ("", "unknown corpus ''; it must be python_stdlib, text_files, tokens, facts, wikitext2, enwik8, text8,"
     " a TFDS data set or an existing path"),
    ("text_files", "corpus 'text_files' needs a path: text_files:PATH, a file, directory or glob"),
    ("python_stdlib:src",
     "corpus 'python_stdlib:src': python_stdlib takes no path; for your own files write text_files:src"),
])  # fmt: skip
def test_bad_corpus(data, corpus, expected):
    assert message(lambda: splits(corpus, data())) == expected


def test_unknown_split(data, make_config):
    expected = (
        "corpus 'python_stdlib' has no split 'valid'; it has: train, validation, test; did you mean 'validation'?"
    )
    assert message(lambda: list(documents("python_stdlib", "valid", data()))) == expected
    assert message(lambda: prepare(make_config(), "valid")) == expected


def test_manual_dir_without_the_file(tmp_path, data):
    result = message(lambda: list(documents("enwik8", "train", data(manual_dir=str(tmp_path)))))
    assert result == f"corpus 'enwik8': config.data.manual_dir='{tmp_path}' contains neither enwik8 nor enwik8.zip"


def test_wrong_checksum(tmp_path, data):
    (tmp_path / "wiki.train.tokens").write_text("not the real one")
    result = message(lambda: list(documents(f"wikitext2:{tmp_path}", "train", data())))
    assert result.startswith(
        f"{tmp_path}/wiki.train.tokens: wrong checksum of wiki.train.tokens of corpus 'wikitext2': sha256 is "
    )
    assert result.endswith(", must be 9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f")


def test_file_that_is_not_a_zip(tmp_path, data):
    (tmp_path / "text8.zip").write_text("<html>moved</html>")
    result = message(lambda: list(documents(f"text8:{tmp_path}", "train", data())))
    assert (
        result
        == f"{tmp_path}/text8.zip: not the zip file of corpus 'text8': File is not a zip file; delete it and try again"
    )


def test_zip_with_a_damaged_member(tmp_path, data):
    with zipfile.ZipFile(tmp_path / "text8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", "many words and many more words\n" * 100)
    content = bytearray((tmp_path / "text8.zip").read_bytes())
    content[40] ^= 0xFF  # in the compressed bytes
    (tmp_path / "text8.zip").write_bytes(content)
    result = message(lambda: list(documents(f"text8:{tmp_path}", "train", data())))
    assert result.startswith(f"{tmp_path}/text8.zip: not the zip file of corpus 'text8': ") and "while decompress" in result


def test_zip_without_its_member(tmp_path, data):
    with zipfile.ZipFile(tmp_path / "text8.zip", "w") as archive:
        archive.writestr("other", "x")
    result = message(lambda: list(documents(f"text8:{tmp_path}", "train", data())))
    assert (
        result.startswith(f"{tmp_path}/text8.zip: not the zip file of corpus 'text8': ")
        and "'text8' in the archive" in result
    )


def test_no_network(data, monkeypatch, tmp_path):
    def unreachable(url, timeout):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    assert message(lambda: list(documents("enwik8", "train", data()))) == (
        "corpus 'enwik8': cannot download https://mattmahoney.net/dc/enwik8.zip (Name or service not known);"
        " download it by hand and set config.data.manual_dir to its directory"
    )
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.name.endswith(".lock")]


class Response(io.BytesIO):
    """An HTTP response with `content`, of which the header announces `length` bytes."""

    def __init__(self, content: bytes, length: int):
        super().__init__(content)
        self.headers = {"Content-Length": str(length)}


def test_download_is_checked_and_kept(data, monkeypatch, tmp_path):
    """A download that the network cuts, or with another content, is not kept."""
    content = b"words and words " * 100
    fake_hutter(monkeypatch, "text8", content)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("text8", content)
    whole = archive.getvalue()
    other = whole.replace(b"words", b"sword")
    answers = [Response(whole[:-9], len(whole)), Response(other, len(whole)), Response(whole, len(whole))]
    requested = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: requested.append(url) or answers.pop(0))

    def text() -> bytes:
        return b"".join(text for split in ("train", "validation", "test") for text in documents("text8", split, data()))

    assert f"the connection ended after {len(whole) - 9:,} of {len(whole):,} bytes" in message(text)
    assert "text8.zip: " in message(text)
    assert text() == text() == content and requested == ["https://mattmahoney.net/dc/text8.zip"] * 3


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_corpus_shorter_than_one_sequence(make_config, text_dir, packing):
    corpus = text_dir({"a.txt": "short text " * 10})
    config = make_config(corpus=corpus, sequence_length=128, packing=packing)
    tokens = 99 + (packing == "documents")
    assert message(lambda: prepare(config, "train")) == (
        f"corpus '{corpus}', split 'train': it has {tokens} tokens; one sequence needs at least 129"
        " with config.sequence_length=128"
    )


def test_corpus_without_text(make_config, text_dir):
    corpus = text_dir({"a.jsonl": '{"text": ""}\n'})
    assert message(lambda: prepare(make_config(corpus=corpus), "validation")) == (
        f"corpus '{corpus}', split 'validation': it has 0 tokens; one sequence needs at least 2"
        " with config.sequence_length=16"
    )


def test_missing_field_of_a_tfds_data_set(data, tfds_corpus):  # noqa: F811
    result = message(lambda: list(documents(tfds_corpus, "train", data(text_field="contents"))))
    assert (
        result == f"corpus '{tfds_corpus}': no field 'contents'; fields present: content, label;"
        " did you mean 'content'? (config.data.text_field)"
    )
    result = message(lambda: list(documents(tfds_corpus, "train", data(text_field="label"))))
    assert result.startswith(f"corpus '{tfds_corpus}': field 'label' is a int")


def test_missing_tokenizer(tmp_path, data):
    assert message(lambda: tokenizer_for(data(tokenizer="byts"))) == (
        "config.data.tokenizer='byts' is not allowed: it must be 'bytes', 'bpe', or the path of an existing"
        " tokenizer file or directory;"
        " did you mean 'bytes'?"
    )
    result = message(lambda: load_tokenizer(tmp_path))
    assert result.startswith(
        f"config.data.tokenizer='{tmp_path}': the directory contains none of bytes.json, tokenizer.json, "
    )


@pytest.mark.parametrize("name, content, expected", [
    ("tokenizer.json", '{"model": {"type": "BPE"', "not a valid tokenizer: Expecting ',' delimiter"),
    ("tokenizer.json", '{"model": {"type": "BPE"}}', "not a valid tokenizer: "),
    ("tokenizer.json", '[1]', "not a valid tokenizer: "),
    ("tokenizer.model", "not a model", "not a valid tokenizer: "),
    ("vocab.json", '{"a": 0}', "the second file, merges.txt, is missing"),
    ("words.json", '{"a": 0}',
     "neither a tokenizer.json nor a GPT-2 vocabulary, which is named *vocab.json or *encoder.json"),
])  # fmt: skip
def test_broken_tokenizer(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    assert message(lambda: load_tokenizer(tmp_path / name)).startswith(f"{tmp_path / name}: {expected}")


def test_a_tokenizer_with_a_huge_id_is_refused_before_a_table_of_ids_is_made(tmp_path):
    values = json.loads(made.byte_level())
    values["model"]["vocab"]["the"] = 2**28
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    error = message(lambda: load_tokenizer(tmp_path))
    assert re.fullmatch(rf"{tmp_path}/tokenizer.json: tokenizer.json has \d+ tokens, but an id of 268,435,456", error)


def test_a_panic_of_a_tokenizer_library_is_one_line(tmp_path, monkeypatch):
    """A panic in Rust is no Exception in Python."""

    class Panic(BaseException):
        pass

    def panics(*_):
        raise Panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(hugging_face, "HuggingFaceTokenizer", panics)
    (tmp_path / "tokenizer.json").write_text(made.byte_level())
    error = message(lambda: load_tokenizer(tmp_path))
    assert error == f"{tmp_path}/tokenizer.json: not a valid tokenizer: called `Option::unwrap()` on a `None` value"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_deeply_nested_json_is_one_line(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text(made.byte_level())
    (tmp_path / name).write_text("[" * 100_000)
    assert message(lambda: load_tokenizer(tmp_path)).startswith(f"{tmp_path / name}: not ")


def test_tokenizer_whose_bytes_are_unknown(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    hf = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    hf.decoder = decoders.BPEDecoder()
    hf.save(str(tmp_path / "tokenizer.json"))
    expected = "tokenizer.json has decoder BPEDecoder; it must be ByteLevel, Metaspace, ByteFallback or WordPiece"
    assert message(lambda: load_tokenizer(tmp_path)) == f"{tmp_path}/tokenizer.json: {expected}"


def test_truncated_real_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(shared("tokenizers/llama2_tokenizer.model").read_bytes()[:1000])
    assert message(lambda: load_tokenizer(tmp_path)).startswith(f"{tmp_path}/tokenizer.model: not a valid tokenizer: ")
