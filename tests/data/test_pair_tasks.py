"""Generated pairs: what they are, that no split has sources of another, and that rows depend on their index alone."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.data.test_pairs import texts_of
from xfresearch.data.pairs import TASKS, open_pairs
from xfresearch.data.pairs.translation import ADJECTIVES, ADVERBS, CLASS, NOUNS, PREPOSITIONS, VERBS, Translation
from xfresearch.data.pipeline import Batches, prepare
from xfresearch.options.objectives import Seq2Seq
from xfresearch.runtime.errors import UserError


@pytest.fixture
def make_task(make_config):
    def make(corpus, source_length=32, length=32, **options):
        config = make_config(length, corpus=corpus, objective=Seq2Seq(**options))
        return replace(config, source_length=source_length)

    return make


def test_sort_and_reverse_are_what_they_say(make_task):
    for name, answer in (("sort", sorted), ("reverse", reversed)):
        pairs = texts_of(prepare(make_task(name), "train").read(range(50)))
        assert all(target == "".join(answer(source)) for source, target in pairs)
        assert {len(source) for source, _ in pairs} == set(range(4, 13)) and len(set(pairs)) > 0.95 * len(pairs)


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_rows_depend_on_their_index_alone(make_task, rows):
    config = make_task("reverse:letters=5", rows=rows)
    whole, some = Batches(config).batch(5), Batches(config).batch(5, [2])
    assert all(np.array_equal(whole[name][[2]], some[name]) for name in whole)
    held_out = prepare(config, "validation")
    firsts = [texts_of(held_out.read([i]))[0] for i in range(5)]
    assert firsts == [tuple(map(bytes.decode, pair)) for pair in islice(held_out.task.pairs("validation"), 5)]
    assert len(held_out) == 2000 and (len(texts_of(held_out.read([0]))) == 1) == (rows == "padded")
    others = [make_task("reverse:letters=5,seed=1", rows=rows), make_task("reverse:letters=5", rows=rows, length=31)]
    assert len({held_out.digest, *(prepare(other, "validation").digest for other in others)}) == 3


def test_no_source_is_in_two_splits(make_task):
    """With 5^3 sources every split sees most of its own many times."""
    task = open_pairs("sort:letters=5,shortest=3,longest=3", make_task("sort").data)
    seen = {split: {next(task.endless(split, n))[0] for n in range(300)} for split in task.splits}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values())) and len(seen["train"]) > 90
    with pytest.raises(UserError, match="has too few sources for a validation split"):
        next(open_pairs("sort:letters=2,shortest=1,longest=1", make_task("sort").data).endless("validation", 0))


def test_pairs_that_are_too_long_are_left_out(make_task):
    meta = prepare(make_task("sort", 8, 32), "validation").meta  # seven letters and the end
    assert 920 < meta["n_longer"] < 1300  # 5 of 9 lengths, of 2,000 pairs
    with pytest.raises(UserError, match="every pair is longer than config.source_length=4"):
        prepare(make_task("sort", 4, 32), "train")


def test_options_of_tasks_are_checked(make_task):
    for corpus, message in (("sort:longest=2", "longest=2 is not allowed"), ("sort:lettres=3", "no such key; did you mean")):
        with pytest.raises(UserError, match=message):
            prepare(make_task(corpus), "train")
    assert set(TASKS) == {"sort", "reverse", "translation"}


def translated(text: str) -> str:
    """The reference: reads the English words from left to right and writes the invented ones."""
    words = text.split()
    adverb = [ADVERBS[words.pop(0)]] if words[0] in ADVERBS else []

    def phrase(case: str = "") -> tuple[list[str], str, bool]:
        stem = {"the": "d", "a": "u", "some": "u", "this": "t", "these": "t", "my": "m"}[words.pop(0)]
        adjective = words.pop(0) if words[0] in ADJECTIVES else ""
        noun = words.pop(0)
        several = noun not in NOUNS
        vowel = CLASS[noun[:-1] if several else noun]
        form = NOUNS[noun[:-1] if several else noun] + ({"o": "mi", "a": "ka", "i": "to"}[vowel] if several else "")
        agreement = vowel + ("n" if several else "")
        return [form, *([ADJECTIVES[adjective] + agreement] if adjective else []), stem + agreement + case], vowel, several

    subject, _, several = phrase()
    helper = words.pop(0) if words[0] in ("will", "do", "does", "did") else ""
    negated = bool(words[0] == "not" and words.pop(0))
    verb = words.pop(0)
    stem = next(each for each in VERBS if verb in (each, f"{each}s", f"{each}ed", f"{each}d"))
    past = helper == "did" or (not helper and verb.endswith("d") and verb != stem)
    assert helper or past or (verb == stem) == several  # English agrees too
    thing, vowel, _ = phrase("r")
    place = [] if not words else [PREPOSITIONS[words.pop(0)]]
    place = [*phrase()[0], *place] if place else []
    ending = {"will": "si"}.get(helper, "ba" if past else "") + ("k" if several else "") + vowel
    return " ".join([*subject, *place, *thing, *adverb, VERBS[stem] + ending, *(["ne"] if negated else [])])


def test_translations_equal_those_of_a_plain_reading():
    task = Translation()
    pairs = [tuple(map(bytes.decode, pair)) for pair in islice(task.pairs("train"), 400)]
    assert all(target == translated(source) for source, target in pairs)
    assert len({source for source, _ in pairs}) == 400
    text = "today the old dogs did not follow a small boat in my garden"  # of the page and of the module
    assert translated(text) == "fosami bazeson don niradu ma tegur dako zonori uir denel sebosbaki ne"
    assert len(set(NOUNS.values()) | set(VERBS.values()) | set(ADJECTIVES.values())) == 48
