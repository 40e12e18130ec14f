import functools
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.data.conftest import shared
from xfresearch.config import DataConfig
from xfresearch.data import bpe
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer, tokenizer_for, vocab_size

CODE = "def main(x):\n    return x + 1  # größer 🦙\n\n\nclass Thing:\n    pass\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small BPE, its data config, and the directory of its corpus."""
    root = tmp_path_factory.mktemp("bpe")
    (root / "code.py").write_text(CODE * 40)
    data = DataConfig(
        corpus=(f"text_files:{root / 'code.py'}",), tokenizer="bpe", bpe_vocab=300, cache_dir=str(root / "cache")
    )
    return tokenizer_for(data), data, root


@pytest.fixture(params=["bytes", "bpe", "gpt2", "llama_spm"])
def tokenizer(request, trained):
    if request.param in ("bytes", "bpe"):
        return ByteTokenizer() if request.param == "bytes" else trained[0]
    return load_tokenizer(
        shared(
            {"gpt2": "tokenizers/gpt2_hf_tokenizer.json", "llama_spm": "tokenizers/llama2_tokenizer.model"}[
                request.param
            ]
        )
    )


@pytest.mark.parametrize("kind, file", [
    ("gpt2", "gpt2_hf_tokenizer.json"), ("gpt2", "gpt2_encoder.json"), ("llama_spm", "llama2_tokenizer.model"),
])  # fmt: skip
def test_published_vectors(kind, file):
    tokenizer = load_tokenizer(shared(f"tokenizers/{file}"))
    vectors = json.loads(shared("tokenizers/tokenizer_test_vectors.json").read_text())[kind]
    assert len(vectors) >= 20
    for vector in vectors:
        assert tokenizer.encode(vector["text"].encode()).tolist() == vector["ids"], vector["text"]
        assert tokenizer.decode(vector["ids"]) == vector["text"]


def test_gpt2_from_a_directory_of_its_two_files(tmp_path):
    shutil.copy(shared("tokenizers/gpt2_encoder.json"), tmp_path / "vocab.json")
    shutil.copy(shared("tokenizers/gpt2_vocab.bpe"), tmp_path / "merges.txt")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    assert tokenizer.encode(b"Hello world").tolist() == [15496, 995]


@hypothesis_settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60))
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert (
        ids.dtype == np.int32 and tokenizer.decode_bytes(ids) == text and tokenizer.byte_lengths[ids].sum() == len(text)
    )


@hypothesis_settings(deadline=None, max_examples=200)
@given(text=st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode), st.just(b"a<|endoftext|>b")))
def test_bpe_round_trip(trained, text):
    tokenizer = trained[0]
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text and tokenizer.end_of_text not in ids
    assert tokenizer.byte_lengths[ids].sum() == len(text)


@hypothesis_settings(deadline=None, max_examples=100)
@given(text=st.binary(max_size=40))
def test_gpt2_round_trip_of_any_bytes(text):
    tokenizer = _gpt2()
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text


@functools.cache
def _gpt2():
    return load_tokenizer(shared("tokenizers/gpt2_hf_tokenizer.json"))


def test_every_tokenizer_counts_the_bytes_of_text(tokenizer):
    text = CODE.encode()
    prefix = 1 if tokenizer.decode_bytes(tokenizer.encode(b"a")) == b" a" else 0  # SentencePiece's dummy space
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text) + prefix
    assert tokenizer.byte_lengths[tokenizer.end_of_text] == 0
    assert tokenizer.decode(tokenizer.encode(text)) == CODE


def test_pieces_encode_like_the_whole(tokenizer):
    text = (CODE + " = Heading = \n \n The  end , of 1984 .\n\n  x\u3000y \t z\n").encode() * 30
    pieces = list(tokenizer.pieces(text, size=100))
    assert len(pieces) > 10
    assert np.array_equal(np.concatenate([tokenizer.encode(piece) for piece in pieces]), tokenizer.encode(text))


def test_stream_emits_only_whole_characters(tokenizer):
    ids = tokenizer.encode(CODE.encode())
    stream = tokenizer.decode_stream()
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == CODE
    assert "\ufffd" not in "".join(parts)


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


def test_bpe_has_the_asked_vocabulary_and_is_deterministic(trained, tmp_path):
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


def test_hugging_face_llama_style_file_knows_its_bytes(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "b"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    hf = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.add_special_tokens(["<unk>", "<s>", "</s>"])
    hf.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_of_text == 2 and tokenizer.byte_lengths[:4].tolist() == [0, 0, 0, 1]
    assert tokenizer.decode(tokenizer.encode("a b aé\n".encode())) == "a b aé\n"
