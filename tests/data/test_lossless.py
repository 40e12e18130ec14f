"""`Tokenizer.lossless`: text that a tokenizer must return unchanged, and texts that others alter."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.data.tokenizers.hugging_face import HuggingFaceTokenizer
from xfresearch.data.tokenizers.llama2c import Llama2cTokenizer
from xfresearch.data.tokenizers.sentence_piece import SentencePieceTokenizer

SPACES = normalizers.Replace(" ", "\u2581")
GEMMA = {
    "normalizer": SPACES,
    "pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous"),
    "decoder": decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "words": [AddedToken("\n\n", normalized=False), AddedToken("\u2581\u2581", normalized=False)],
}
CODE = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(True), pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(False, False, False)]
)
LOSSLESS = {
    "bytes": ("bytes", ByteTokenizer),
    "gpt2": ("bytes", lambda: load_tokenizer(shared("tokenizers/gpt2_hf_tokenizer.json"))),
    "byte level": ("bytes", lambda: HuggingFaceTokenizer(made.byte_level())),
    "byte level, words": ("bytes", lambda: HuggingFaceTokenizer(made.byte_level(words=["  ", "\n\n", "日本"]))),
    "byte level, split": ("bytes", lambda: HuggingFaceTokenizer(made.byte_level(pre_tokenizer=CODE))),
    "llama2.c": ("bytes", lambda: Llama2cTokenizer(made.llama2c(made.sentence_piece()))),
    "llama2": ("text", lambda: load_tokenizer(shared("tokenizers/llama2_tokenizer.model"))),
    "sentencepiece": ("text", lambda: SentencePieceTokenizer(made.sentence_piece())),
    "sentencepiece, no prefix": (
        "text", lambda: SentencePieceTokenizer(made.sentence_piece(add_dummy_prefix=False))
    ),
    "byte fallback": ("text", lambda: HuggingFaceTokenizer(made.byte_fallback())),
    "gemma": ("text", lambda: HuggingFaceTokenizer(made.byte_fallback(**GEMMA))),
    "words": ("text", lambda: HuggingFaceTokenizer(word_fallback())),
    "byte level, pieces outside": ("bytes", lambda: HuggingFaceTokenizer(byte_words(others=[" ", "\u2014"]))),
}  # fmt: skip
TOKENIZER = {name: cache(make) for name, (_, make) in LOSSLESS.items()}
METASPACE = {"normalizer": None, "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)}


def without_a_byte() -> str:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"q"})
    hf = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return hf.to_str()


def word_fallback(pieces=("\u2581",), ignore_merges=False, unigram=False, special=(), **parts) -> str:
    """A tokenizer.json with byte fallback and a model that has these pieces, by default without a space in front."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "t", "h", "th"]
    if unigram:
        hf = Tokenizer(models.Unigram([(name, -float(number)) for number, name in enumerate(names)], 0, True))
    else:
        ids, settings = {name: number for number, name in enumerate(names)}, {"ignore_merges": ignore_merges}
        hf = Tokenizer(models.BPE(ids, [("t", "h")], unk_token="<unk>", byte_fallback=True, **settings))
    hf.normalizer, hf.decoder = SPACES, GEMMA["decoder"]
    return made._finished(hf, ["<unk>", "<s>", "</s>", *special], parts)


def byte_words(special=(), without="", others=(), **parts) -> str:
    """A byte-level tokenizer.json with the pieces th and the, some of them special, without the piece of a byte."""
    alphabet = [piece for piece in sorted(pre_tokenizers.ByteLevel.alphabet()) if piece != without]
    ids = {piece: number for number, piece in enumerate([*alphabet, "th", "the", "<s>", *others])}
    hf = Tokenizer(models.BPE(ids, [("t", "h"), ("th", "e")], ignore_merges=True))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return made._finished(hf, list(special), parts)


TWICE = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel(False)])
UNDERSCORE = {"normalizer": None, "pre_tokenizer": pre_tokenizers.Metaspace("_", "never", split=False)}
TWO_SPACES = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Prepend("\u2581"), SPACES])

# Tokenizers with a text that each of them alters.
ALTERS = {
    "nfkc": (lambda: SentencePieceTokenizer(made.sentence_piece(normalization_rule_name="nmt_nfkc")), "ﬁ"),
    "spaces": (lambda: SentencePieceTokenizer(made.sentence_piece(remove_extra_whitespaces=True)), "a  a"),
    "unknown": (lambda: SentencePieceTokenizer(made.sentence_piece(byte_fallback=False)), "日"),
    "words": (lambda: SentencePieceTokenizer(made.sentence_piece(model_type="word")), "an unknown word"),
    "suffix": (lambda: SentencePieceTokenizer(made.sentence_piece(treat_whitespace_as_suffix=True)), "a"),
    "nfc": (lambda: HuggingFaceTokenizer(made.byte_level(normalizer=normalizers.NFC())), "e\u0301"),
    "lower": (lambda: HuggingFaceTokenizer(made.byte_fallback(normalizer=normalizers.Lowercase())), "A"),
    "prefix": (
        lambda: HuggingFaceTokenizer(made.byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))),
        "a",
    ),
    "removed": (
        lambda: HuggingFaceTokenizer(made.byte_fallback(pre_tokenizer=pre_tokenizers.Split("-", "removed"))), "a-a"
    ),
    "strips": (lambda: HuggingFaceTokenizer(made.byte_level(words=[AddedToken("x", lstrip=True)])), "a x"),
    "space each": (lambda: HuggingFaceTokenizer(made.byte_fallback(words=[AddedToken("x", normalized=False)])), "axa"),
    "metaspace": (lambda: HuggingFaceTokenizer(made.byte_fallback(**METASPACE)), " a"),
    "one byte less": (lambda: HuggingFaceTokenizer(without_a_byte()), "q"),
    "a byte as a whole word": (
        lambda: HuggingFaceTokenizer(byte_words(without="q", words=[AddedToken("q", single_word=True)])), "aqa"
    ),
    "a space in place of its byte": (lambda: HuggingFaceTokenizer(byte_words(without="\u0120", others=[" "])), "a a"),
    "special piece": (lambda: HuggingFaceTokenizer(byte_words(special=["the"])), "the"),
    "special whole text": (
        lambda: HuggingFaceTokenizer(
            byte_words(special=["<s>"], pre_tokenizer=pre_tokenizers.ByteLevel(False, use_regex=False))
        ),
        "<s>",
    ),
    "bytes twice": (lambda: HuggingFaceTokenizer(made.byte_level(pre_tokenizer=TWICE)), " "),
    "bytes in both steps": (lambda: HuggingFaceTokenizer(made.byte_level(normalizer=normalizers.ByteLevel())), " "),
    "unigram, special": (lambda: HuggingFaceTokenizer(word_fallback(unigram=True)), "</s>"),
    "unigram, name of a byte": (lambda: HuggingFaceTokenizer(word_fallback(unigram=True)), "<0x41>"),
    "merges ignored": (lambda: HuggingFaceTokenizer(word_fallback(ignore_merges=True)), "</s>"),
    "special piece of words": (lambda: HuggingFaceTokenizer(word_fallback(special=["th"])), "th"),
    "no piece for a space": (lambda: HuggingFaceTokenizer(word_fallback(pieces=())), " "),
    "two spaces in front": (lambda: HuggingFaceTokenizer(made.byte_fallback(normalizer=TWO_SPACES)), "a"),
    "metaspace, another character": (lambda: HuggingFaceTokenizer(word_fallback(**UNDERSCORE)), " "),
}  # fmt: skip

# Text that is easily lost: spaces at the ends or repeated, names of tokens, characters with several Unicode forms.
PARTS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\0",
    "a",
    "the",
    "<0x41>",
    "</s>",
    "<s>",
    "<|endoftext|>",
    "e\u0301",
    "é",
]
PARTS += ["ﬁ", "\u00a0", "\u3000", "\ufeff", "\u200b", "日本", "🦙", "A", "12", "\ufffd"]
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\u2581")
TEXTS = st.lists(st.sampled_from(PARTS) | CHARACTERS, max_size=12).map("".join)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_text_round_trips(name, text):
    tokenizer = TOKENIZER[name]()
    assert tokenizer.lossless == LOSSLESS[name][0]
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert not set(ids.tolist()) & set(tokenizer.stops) and tokenizer.begin_of_text not in ids


@pytest.mark.parametrize("name", [name for name, (promise, _) in LOSSLESS.items() if promise == "bytes"])
@settings(deadline=None, max_examples=150)
@given(text=st.binary(max_size=12) | st.lists(st.binary(max_size=2) | TEXTS.map(str.encode), max_size=4).map(b"".join))
def test_bytes_round_trip(name, text):
    tokenizer = TOKENIZER[name]()
    prefix = b" " if text and name == "llama2.c" else b""
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == prefix + text and ids.dtype == np.int32
    assert tokenizer.byte_lengths[ids].sum() == len(prefix + text)


@pytest.mark.parametrize("name", ALTERS)
def test_tokenizer_that_alters_a_text_is_not_lossless(name):
    make, text = ALTERS[name]
    tokenizer = make()
    assert tokenizer.lossless == ""
    assert tokenizer.decode(tokenizer.encode(text.encode())) != text
