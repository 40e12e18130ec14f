"""Tokenizer files of llama2.c: the encoding equals SentencePiece's, and a damaged file raises a one-line error."""

import random
import struct

import numpy as np
import pytest

from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.data.tokenizers.llama2c import Llama2cTokenizer
from xfresearch.data.tokenizers.sentence_piece import SentencePieceTokenizer
from xfresearch.runtime.errors import UserError

PARTS = [
    "a",
    "th",
    "the",
    " ",
    "  ",
    "\n",
    "in",
    "return",
    "é",
    "日",
    "🦙",
    "0",
    "<0x41>",
    "</s>",
    "\0",
    "\x80",
    "\t",
    "xx",
]


@pytest.fixture(params=["made", "llama2"])
def model(request) -> bytes:
    if request.param == "made":
        return made.sentence_piece()
    return shared("tokenizers/llama2_tokenizer.model").read_bytes()


def test_encoding_equals_that_of_sentencepiece(model):
    theirs, ours = SentencePieceTokenizer(model), Llama2cTokenizer(made.llama2c(model))
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choices(PARTS, k=chance.randrange(20)))
        assert ours.encode(text.encode()).tolist() == theirs.encode(text.encode()).tolist(), text
    long = " ".join(made.LINES) * 10
    assert np.array_equal(ours.encode(long.encode()), theirs.encode(long.encode()))


def pack(pieces: list[tuple[float, bytes]]) -> bytes:
    records = [struct.pack("<fi", score, len(piece)) + piece for score, piece in pieces]
    return struct.pack("<i", max(len(piece) for _, piece in pieces)) + b"".join(records)


SPECIAL_PIECES = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n")]
BASE_PIECES = SPECIAL_PIECES + [(0.0, f"<0x{i:02X}>".encode()) for i in range(256)]


def test_leftmost_pair_of_equal_scores_is_merged_first():
    words = [(-9.0, b" "), (-9.0, b"a"), (-1.0, b"aa"), (-2.0, b"aaa")]
    tokenizer = Llama2cTokenizer(pack(BASE_PIECES + words))
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode(b"aaaaa")] == [b" ", b"aa", b"aaa"]


def test_pair_with_a_better_score_is_merged_before_one_to_its_left():
    words = [(-9.0, b" "), (-9.0, b"a"), (-9.0, b"b"), (-2.0, b"ab"), (-1.0, b"ba")]
    tokenizer = Llama2cTokenizer(pack(BASE_PIECES + words))
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode(b"aba")] == [b" ", b"a", b"ba"]


def test_begin_of_text_is_also_the_separator(tmp_path):
    tokenizer = load_tokenizer(shared("stories260K/tok512.bin"))
    assert (tokenizer.vocab_size, tokenizer.begin_of_text, tokenizer.stops) == (512, 1, (1,))
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["llama2c.bin"] and loaded.digest == tokenizer.digest
    assert loaded.stops == (1,)


GOOD = pack([*BASE_PIECES, (-1.0, b" ")])
BROKEN = {
    "without pieces": (bytes(4), "ids 3 to 258 must be the bytes"),
    "cut in a piece": (GOOD[:-1], "piece 259 is damaged or truncated"),
    "cut in a length": (GOOD[:-3], "piece 259 is damaged or truncated"),
    "cut in a score": (GOOD[:-6], "piece 259 is damaged or truncated"),
    "no bytes": (pack([(0.0, b"a")] * 300), "ids 3 to 258 must be the bytes"),
    "too long a piece": (struct.pack("<i", 4) + GOOD[4:], "piece 0 is damaged or truncated"),
    "negative length": (GOOD[:4] + struct.pack("<fi", 0, -5) + GOOD[12:], "piece 0 is damaged or truncated"),
    "not a number": (pack([*BASE_PIECES, (float("nan"), b" ")]), "piece 259 has the score nan: it must be more than -1e+10"),
    "a model": (struct.pack("<7i", 64, 172, 5, 8, 4, 512, 512) + bytes(4000), "is damaged or truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_file_raises_a_one_line_error(tmp_path, name):
    content, expected = BROKEN[name]
    (tmp_path / "tok.bin").write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_tokenizer(tmp_path / "tok.bin")
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}/tok.bin: not a") and expected in text and "\n" not in text
