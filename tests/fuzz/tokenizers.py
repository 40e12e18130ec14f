"""Readers of damaged tokenizer files, the references that they are compared with, and valid SentencePiece models."""

import struct
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from tests.data import made_tokenizers as made
from xfresearch.data.tokenizers import Tokenizer, load_tokenizer

TEXT = "\n".join(made.LINES[:6]) + "  \u4e2d\n"  # the words that the models are trained on, and a character that they lack
# Default values, which a model has as values, so that they are damaged, only if they are given.
WRITTEN = dict(
    escape_whitespaces=True, add_dummy_prefix=True, treat_whitespace_as_suffix=False, bos_id=1, eos_id=2, unk_piece="<unk>"
)


def tokenizer_json(file: Path) -> None:
    _check(load_tokenizer(file))


def steps(file: Path) -> None:
    """Only that a text is read or refused: a normaliser may make anything of it."""
    loaded = load_tokenizer(file)
    for text in (TEXT, "a" * 3000, " " * 3000, "\ufdfa" * 300):
        assert all(0 <= i < loaded.vocab_size for i in loaded.encode(text.encode()))


def sentence_piece(file: Path) -> None:
    """Ids equal those of the reference library, which reads what we read."""
    content = file.read_bytes()
    loaded = load_tokenizer(file)
    assert loaded.encode(TEXT.encode()).tolist() == SentencePieceProcessor(model_proto=content).encode(TEXT)
    _check(loaded)


def llama2c_tokenizer(file: Path) -> None:
    """Ids equal those of run.c."""
    loaded = load_tokenizer(file)
    assert loaded.encode(TEXT.encode()).tolist() == _run_c(file.read_bytes(), TEXT)
    _check(loaded)


def _check(loaded: Tokenizer) -> None:
    """Ids are in the vocabulary, pieces of a text have the ids of the text, and decoding restores what it promises."""
    ids = loaded.encode(TEXT.encode())
    assert all(0 <= i < loaded.vocab_size for i in ids)
    assert np.array_equal(np.concatenate([loaded.encode(piece) for piece in loaded.pieces(TEXT.encode(), 1)]), ids)
    assert loaded.decode(ids) == TEXT or not loaded.lossless


def _run_c(content: bytes, text: str) -> list[int]:
    """What `encode` of run.c returns, without <s>. Of equal pieces the first counts; in run.c any of them."""
    pieces, scores, at = [], [], 4
    while at < len(content):
        score, size = struct.unpack_from("<fi", content, at)
        pieces.append(content[at + 8 : at + 8 + size])
        scores.append(score)
        at += 8 + size
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    collected = []
    for character in map(str.encode, " " + text):
        collected += [ids[character]] if character in ids else [byte + 3 for byte in character]
    while True:
        best, best_left, best_id = -1e10, None, None
        for left in range(len(collected) - 1):
            merged = ids.get(pieces[collected[left]] + pieces[collected[left + 1]])
            if merged is not None and scores[merged] > best:
                best, best_left, best_id = scores[merged], left, merged
        if best_id is None:
            return collected
        collected[best_left : best_left + 2] = [best_id]


def write_sentence_pieces(directory: Path) -> list[Path]:
    """A BPE with byte fallback, and a unigram model with rules of normalisation. Both have words among the first ids."""
    rules = directory / "rules.tsv"
    rules.write_text("E9\t65\n41\t61\n")  # an accented e becomes e, A becomes a
    models = {
        "bpe.model": _bytes_last(made.sentence_piece(**WRITTEN)),
        "unigram.model": made.sentence_piece(
            model_type="unigram", byte_fallback=False, normalization_rule_tsv=str(rules), **WRITTEN
        ),
    }
    for name, content in models.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in models]


def _bytes_last(content: bytes) -> bytes:
    """Only the first pieces of a model are damaged as values: they should be words."""
    model = ModelProto.FromString(content)
    pieces = sorted(model.pieces, key=lambda piece: piece.type == piece.BYTE)
    del model.pieces[:]
    model.pieces.extend(pieces)
    return model.SerializeToString()
