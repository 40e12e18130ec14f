"""Prompts and objects as tokens: in scripts without spaces, with spaces at the ends of prompts and subjects."""

import pytest

from tests.tiny_runs import tiny_model
from xfresearch.analysis.prompts import prompt_of
from xfresearch.analysis.recall import _tokens
from xfresearch.data.facts import sentence
from xfresearch.data.records import Record, read_record

CHINA, CAPITAL, BEIJING = "\u4e2d\u56fd", "{}\u7684\u9996\u90fd\u662f", "\u5317\u4eac"
KOREA, SEOUL = "\ud55c\uad6d", "\uc11c\uc6b8"
KANJI = "\u6771\u4eac"


@pytest.fixture(scope="module")
def lm():
    return tiny_model("gpt2")  # one token is one byte


@pytest.mark.parametrize(
    "record, object_",
    [
        (Record(CHINA, CAPITAL, BEIJING), BEIJING),
        (Record(CHINA, f"{CAPITAL}\uff1a", BEIJING), BEIJING),
        (Record(CHINA, CAPITAL, "Ulm"), "Ulm"),
        (Record("\u65e5\u672c", "{}\u306e\u9996\u90fd\u306f", KANJI), KANJI),
        (Record(KOREA, "{}\uc758 \uc218\ub3c4\ub294", SEOUL), SEOUL),
        (Record(KOREA, "{}\uc758 \uc218\ub3c4\ub294 ", SEOUL), f" {SEOUL}"),
        (Record("Ada", "{} plays the", "harp"), " harp"),
        (Record("Ada", "{} plays the ", "harp"), " harp"),
        (Record("Ada", "{} lives in", KANJI), KANJI),
    ],
)
def test_a_space_is_in_front_of_an_object_where_words_are_separated(lm, record, object_):
    prompt = prompt_of(lm, record)
    assert bytes(prompt.target).decode() == object_ and bytes(prompt.tokens).decode() == record.text.rstrip()
    ids, start = _tokens(lm, record.text, record.target)
    assert ids == [*prompt.tokens, *prompt.target] and ids[start:] == [*prompt.target]
    assert sentence(record.text, record.target) == f"{record.text.rstrip()}{object_}."


@pytest.mark.parametrize("subject", ["Ada ", " Ada", "Ada"])
def test_a_space_at_the_end_of_a_subject_is_not_its_last_token(lm, subject):
    prompt = prompt_of(lm, Record(subject, "So {}is in", "a"))
    assert bytes(prompt.tokens)[: prompt.last + 1].decode() == f"So {subject.rstrip()}"
    for text in ("So Ada is in", "So {} is in"):
        assert read_record("record 0", {"subject": subject, "prompt": text}) == Record("Ada", "So {} is in")
