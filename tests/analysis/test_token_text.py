"""Texts of tokens: a leading space stays, and an id without text has a number."""

import pytest

from xfresearch.analysis.token_classes import CLASSES, classes
from xfresearch.analysis.token_text import plain, shown
from xfresearch.data.tokenizers.base import Tokenizer


class Words(Tokenizer):
    """Like SentencePiece's, it drops the space before the first word of a text."""

    def __init__(self):
        super().__init__([b" the", b"ing", b"\n", b"\xc3", b"\xa9", b" 7"], {}, dummy_prefix=True)

    def _encode(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def tokenizer() -> Words:
    return Words()


def test_a_leading_space_stays(tokenizer):
    assert tokenizer.decode([0]) == "the" and plain(tokenizer, [0]) == shown(tokenizer, [0]) == " the"
    assert plain(tokenizer, [0, 1, 2, 3, 4]) == " theing\n\u00e9" and shown(tokenizer, [2, 3]) == "\\n\ufffd"


def test_a_token_without_text_is_a_number_for_readers_only(tokenizer):
    assert tokenizer.end_of_text == 6 and tokenizer.vocab_size == 7
    assert plain(tokenizer, [1, 6, 9]) == "ing" and shown(tokenizer, [1, 6, 9]) == "ing<6><9>"
    assert shown(None, [4, 12]) == "4 12"


def test_classes_of_tokens_are_those_in_the_middle_of_a_text(tokenizer):
    listed = [CLASSES[number] for number in classes(tokenizer, 9)]
    assert listed == ["word", "letters", "space", "other", "other", "digits", "special", "special", "special"]
