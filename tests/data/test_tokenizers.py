import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from xfresearch.data.tokenizers import ByteTokenizer, bpe, load_tokenizer, tokenizer_for, vocab_size
from xfresearch.options.run_options import DataConfig

CODE = "def main(x):\n    return x + 1  # größer 🦙\n\n\nclass Thing:\n    pass\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small trained BPE, its data config, and the directory of its corpus."""
    root = tmp_path_factory.mktemp("bpe")
    (root / "code.py").write_text(CODE * 40)
    data = DataConfig(
        corpus=(f"text_files:{root / 'code.py'}",), tokenizer="bpe", bpe_vocab=300, cache_dir=str(root / "cache")
    )
    return tokenizer_for(data), data, root


FILES = {
    "gpt2": "tokenizers/gpt2_hf_tokenizer.json",
    "llama_spm": "tokenizers/llama2_tokenizer.model",
    "llama2c": "stories260K/tok512.bin",
}


@pytest.fixture(params=["bytes", "bpe", *FILES])
def tokenizer(request, trained):
    if request.param in FILES:
        return load_tokenizer(shared(FILES[request.param]))
    return ByteTokenizer() if request.param == "bytes" else trained[0]


@pytest.mark.parametrize("kind, file", [
    ("gpt2", "gpt2_hf_tokenizer.json"), ("gpt2", "gpt2_encoder.json"), ("llama_spm", "llama2_tokenizer.model"),
])  # fmt: skip
def test_encoding_matches_published_vectors(kind, file):
    tokenizer = load_tokenizer(shared(f"tokenizers/{file}"))
    vectors = json.loads(shared("tokenizers/tokenizer_test_vectors.json").read_text())
    assert len(vectors["gpt2"]) + len(vectors["llama_spm"]) == 51
    for vector in vectors[kind]:
        assert tokenizer.encode(vector["text"].encode()).tolist() == vector["ids"], vector["text"]
        assert tokenizer.decode(vector["ids"]) == vector["text"]


def test_gpt2_from_a_directory_of_its_two_files(tmp_path):
    shutil.copy(shared("tokenizers/gpt2_encoder.json"), tmp_path / "vocab.json")
    shutil.copy(shared("tokenizers/gpt2_vocab.bpe"), tmp_path / "merges.txt")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    assert tokenizer.encode(b"Hello world").tolist() == [15496, 995]


@hypothesis_settings(deadline=None, max_examples=200)
@given(text=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode), st.just(b"a<|endoftext|>b")))
def test_bpe_round_trip(trained, text):
    tokenizer = trained[0]
    ids = tokenizer.encode(text)
    assert tokenizer.lossless == "bytes" and tokenizer.begin_of_text is None
    assert tokenizer.decode_bytes(ids) == text and tokenizer.end_of_text not in ids
    assert tokenizer.byte_lengths[ids].sum() == len(text)


def test_every_tokenizer_counts_the_bytes_of_text(tokenizer):
    text = CODE.encode()
    prefix = 1 if tokenizer.decode_bytes(tokenizer.encode(b"a")) == b" a" else 0  # SentencePiece adds a dummy space
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text) + prefix
    assert tokenizer.byte_lengths[tokenizer.end_of_text] == 0
    assert tokenizer.decode(tokenizer.encode(text)) == CODE


def test_pieces_encode_like_the_whole(tokenizer):
    text = (CODE + " = Heading = \n \n The  end , of 1984 .\n\n  x\u3000y \t z\n").encode() * 30
    pieces = list(tokenizer.pieces(text, size=100))
    assert len(pieces) > 10
    assert np.array_equal(np.concatenate([tokenizer.encode(piece) for piece in pieces]), tokenizer.encode(text))


def test_pieces_encode_like_the_whole_if_tokens_have_spaces_inside(tmp_path):
    made.write(tmp_path, {"tokenizer.model": made.sentence_piece(split_by_whitespace=False)})
    tokenizer = load_tokenizer(tmp_path)
    assert b"d the dog" in tokenizer.token_bytes
    text = "\n".join(made.LINES).encode()
    pieces = tokenizer.pieces(text, size=4)
    assert np.array_equal(np.concatenate([tokenizer.encode(piece) for piece in pieces]), tokenizer.encode(text))


def test_stream_emits_only_whole_characters(tokenizer):
    ids = tokenizer.encode(CODE.encode())
    stream = tokenizer.decode_stream()
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == CODE
    assert "\ufffd" not in "".join(parts)


def test_stream_that_continues_a_text_keeps_its_first_space(tokenizer):
    ids = tokenizer.encode(b"the dog the")
    rest = tokenizer.decode_bytes(ids[1:])
    assert tokenizer.decode_stream(begins=False).push(ids[1:]) == rest.decode()


def test_stream_flushes_an_incomplete_character():
    stream = ByteTokenizer().decode_stream()
    assert (stream.push([97, 0xC3]), stream.push(256), stream.flush()) == ("a", "", "\ufffd")


def test_saved_tokenizer_loads_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert (loaded.vocab_size, loaded.end_of_text, loaded.digest) == (
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        tokenizer.digest,
    )
    assert np.array_equal(loaded.encode(CODE.encode()), tokenizer.encode(CODE.encode()))


def test_bpe_has_the_requested_vocabulary_size_and_is_deterministic(trained, tmp_path):
    tokenizer, data, _ = trained
    assert tokenizer.vocab_size == vocab_size(data) == 300 and tokenizer.end_of_text == 0
    bpe.train(data, tmp_path)
    assert load_tokenizer(tmp_path).digest == tokenizer.digest
    assert len(tokenizer.encode(CODE.encode())) < len(CODE.encode()) / 2


def test_small_corpus_fills_the_vocabulary_with_unused_ids(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n" * 30)
    data = DataConfig(
        corpus=(f"text_files:{tmp_path / 'a.txt'}",), tokenizer="bpe", bpe_vocab=1000, cache_dir=str(tmp_path / "cache")
    )
    tokenizer = tokenizer_for(data)
    assert tokenizer.vocab_size == 1000 and tokenizer.byte_lengths[999] == 0 and tokenizer.decode([999]) == ""


def test_bpe_splits_code_at_line_ends_and_numbers(trained):
    tokenizer = trained[0]
    pieces = [tokenizer.token_bytes[i] for i in tokenizer.encode(b"x = 12345\n    return x\n")]
    assert b"".join(pieces) == b"x = 12345\n    return x\n"
    assert not any(b"\n" in piece.rstrip(b"\n") for piece in pieces)


@pytest.mark.parametrize("name, size", [("gpt2_hf_tokenizer.json", 50257), ("llama2_tokenizer.model", 32000)])
def test_vocab_size_of_files(name, size):
    assert vocab_size(DataConfig(tokenizer=str(shared(f"tokenizers/{name}")))) == size


def test_tokens_of_a_llama_style_tokenizer_json_have_their_bytes(tmp_path):
    made.write(tmp_path, {"tokenizer.json": made.byte_fallback()})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_of_text == 2 and tokenizer.byte_lengths[:4].tolist() == [0, 0, 0, 1]
    assert tokenizer.decode(tokenizer.encode("a b aé\n".encode())) == "a b aé\n"
