"""The corpora of facts: the generated set, relation files, and what is held out."""

import json
import re
from collections import Counter, defaultdict
from functools import cache
from random import Random

import pytest

from xfresearch.data.cache import digest
from xfresearch.data.corpora import documents, open_corpus, splits
from xfresearch.data.facts import (
    CHAINS,
    LISTS,
    PASSES,
    SECOND,
    WORDS,
    Fact,
    FactSentences,
    _with_second,
    consequences,
    facts,
    facts_of,
    neighbours,
    sentence,
)
from xfresearch.data.records import record_of
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError

MAYORS = {
    "name": "city mayor",
    "prompt_templates": ["The mayor of {} is", "{} is led by"],
    "prompt_templates_zs": ["Who leads {}? It is", "The mayor of {} is"],
    "samples": [
        {"subject": "Aa", "object": "Xu"},
        {"subject": "Bb", "object": "Yo"},
        {"subject": "Cc", "object": "Xu"},
        {"subject": "Dd", "object": "Xu"},
        {"subject": "Dd", "object": "Yo"},  # two objects
        {"subject": "Bb", "object": "Yo"},  # the same fact again
    ],
}
RIVERS = {"name": "river", "prompt_templates": ["{} is on the"], "samples": [{"subject": "Aa", "object": "Po"}] * 2}
RIVERS["samples"].append({"subject": "Bb", "object": "Po"})


@pytest.fixture
def folder(tmp_path):
    """folder({name: content}) writes files, and returns their folder."""

    def make(files: dict):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return tmp_path

    return make


def lines(source: str, split: str) -> list[str]:
    return [line for text in FactSentences(source).documents(split) for line in text.decode().split("\n")]


def templates_of(known: list[Fact], field: str) -> dict[str, set[str]]:
    result = defaultdict(set)
    for fact in known:
        result[fact.relation] |= {text.replace(fact.subject, "{}") for text in getattr(fact, field)}
    return result


def assert_held_out(source: str) -> None:
    """No sentence of a held-out paraphrase is in the train split, while its template is."""
    known, trained = facts(source), set(lines(source, "train"))
    templates = templates_of(known, "prompts")
    for fact in known:
        assert fact.prompts and fact.held_out and not set(fact.prompts) & set(fact.held_out)
        for text in fact.held_out:
            assert sentence(text, fact.object) not in trained
            assert text.replace(fact.subject, "{}") in templates[fact.relation]


def test_the_generated_set_is_a_function_of_its_seed():
    assert facts() == facts()
    assert digest(facts()) == "59d5c0954ebf0d89"
    assert digest(list(map(bytes.decode, FactSentences("").documents("train")))) == "34811d17477f745d"


def test_the_generated_set_is_as_large_as_it_says():
    known = facts()
    assert len(known) == len({(fact.relation, fact.subject) for fact in known}) == 1000
    assert len({fact.relation for fact in known}) == 11
    assert all(len(templates) == 8 for templates in templates_of(known, "prompts").values())
    assert {len(fact.prompts) for fact in known} == {6} and {len(fact.held_out) for fact in known} == {2}


def test_prompts_have_the_subject_at_the_start_and_in_the_middle_and_end_before_the_object():
    for fact in facts():
        for texts in (fact.prompts, fact.held_out):
            assert all(text.count(fact.subject) == 1 and not text.endswith((fact.subject, " ")) for text in texts)
            assert {text.startswith(fact.subject) for text in texts} == {True, False}


def test_held_out_paraphrases_are_not_in_the_train_split_while_their_templates_are():
    assert_held_out("")


def all_subjects() -> str:
    """As a pattern."""
    return "|".join(sorted({fact.subject for fact in facts()}, key=len, reverse=True))


@cache
def without_second(line: str, subjects: str) -> str:
    """A sentence of the train split without the subject that it is not about. subjects: all of them, as a pattern."""
    for frame in (*WORDS["after"], *WORDS["before"]):
        pattern = re.escape(frame).replace(re.escape("{other}"), f"(?:{subjects})")
        kept = "(.*)" if frame in WORDS["before"] else f"({subjects})"
        line = re.sub(pattern.replace(re.escape("{}"), kept), r"\1", line)
    return line


def test_documents_have_each_sentence_as_often_as_they_say():
    known = facts()
    expected = [sentence(text, fact.object) for fact in known for text in fact.held_out]
    assert Counter(lines("", "validation")) == Counter(expected)
    subjects = all_subjects()
    expected = Counter(sentence(text, fact.object) for fact in known for text in fact.prompts)
    result = lines("", "train")
    plain = Counter(without_second(line, subjects) for line in result)
    lists = plain - Counter({line: count * PASSES for line, count in expected.items()})
    assert all(plain[line] == PASSES * count for line, count in expected.items())
    assert len(result) == PASSES * (expected.total() + LISTS * len(subjects.split("|")))
    share = sum(line not in expected and line not in lists for line in result) / (PASSES * expected.total())
    assert abs(share - SECOND) < 0.02  # of 24,000; a subject drawn at random may be the sentence's


def test_lists_have_all_objects_of_a_subject_in_different_orders():
    objects = defaultdict(list)
    for fact in facts():
        objects[fact.subject].append(fact.object)
    result = defaultdict(Counter)
    for words in map(str.split, lines("", "train")):
        for size in range(1, len(words)):
            subject, rest = " ".join(words[:size]), " ".join(words[size:]).removesuffix(".")
            if subject in objects and sorted(rest.split()) == sorted(objects[subject]):
                result[subject][rest] += 1
    assert {count.total() for count in result.values()} == {PASSES * LISTS} and result.keys() == objects.keys()
    assert all(len(orders) > 1 for orders in result.values())


def test_documents_have_a_handful_of_sentences_and_each_fact_comes_after_other_text():
    texts, subjects = [text.decode().split("\n") for text in FactSentences("").documents("train")], all_subjects()
    sizes = Counter(map(len, texts))  # the last document of a pass may be short
    assert set(range(3, 10)) <= sizes.keys() and max(sizes) == 9 and sizes[1] + sizes[2] <= PASSES
    before = {sentence(text, fact.object): set() for fact in facts() for text in fact.prompts}
    for text in texts:
        for number, line in enumerate(text):
            before.get(without_second(line, subjects), set()).add(tuple(text[:number]))  # a list may come once
    assert sum(len(result) > 2 for result in before.values()) > 0.9 * len(before)


def test_every_object_is_shared_so_every_fact_has_neighbours():
    known = facts()
    for fact in known:
        result = neighbours(known, fact)
        assert result and fact not in result
        assert all((each.relation, each.object) == (fact.relation, fact.object) for each in result)
        assert len(result) == sum((f.relation, f.object) == (fact.relation, fact.object) for f in known) - 1


def test_no_object_is_the_start_of_another_one_of_its_relation():
    objects = defaultdict(set)
    for fact in facts():
        objects[fact.relation].add(fact.object)
    for result in objects.values():
        assert not [(a, b) for a in result for b in result if a != b and b.startswith(a)]


def test_names_are_those_of_several_people_and_of_one_kind():
    people = {fact.subject for fact in facts() if fact.relation == "profession"}
    assert len(people) == 120
    for part, people_of_a_name in enumerate((15, 3)):
        assert set(Counter(name.split()[part] for name in people).values()) == {people_of_a_name}
    kinds = [name for names in ("cities", "companies", "countries", "rivers") for name in WORDS[names]]
    assert len(kinds) == len(set(kinds))


def test_chains_hold_and_an_edit_has_consequences():
    known = facts()
    objects = {(fact.relation, fact.subject): fact.object for fact in known}
    for first, second, third in CHAINS:
        for fact in known:
            if fact.relation == first:
                assert objects[third, fact.subject] == objects[second, fact.object]
        of_first = next(fact for fact in known if fact.relation == first)
        new = next(name for name in {o for r, o in objects if r == second} if name != of_first.object)
        (result,) = consequences(known, of_first, new)
        assert (result.relation, result.subject, result.object) == (third, of_first.subject, objects[second, new])
        of_second = next(fact for fact in known if fact.relation == second and fact.subject == of_first.object)
        result = consequences(known, of_second, "Nowhere")
        through = {fact.subject for fact in known if fact.relation == first and fact.object == of_second.subject}
        assert {fact.subject for fact in result} == through and {fact.object for fact in result} == {"Nowhere"}
    profession = next(fact for fact in known if fact.relation == "profession")
    assert consequences(known, profession, "judge") == []


def test_relation_files_are_read(folder):
    source = str(folder({"b.json": RIVERS, "a.json": MAYORS, "notes.txt": b"x"}))
    known = facts(source)
    assert [(fact.subject, fact.relation, fact.object) for fact in known] == [
        ("Aa", "city mayor", "Xu"), ("Bb", "city mayor", "Yo"), ("Cc", "city mayor", "Xu"),
        ("Aa", "river", "Po"), ("Bb", "river", "Po"),
    ]  # fmt: skip
    assert known[1].held_out == tuple(frame.replace("{}", "Bb is led by") for frame in WORDS["frames"])
    assert "For the record: The mayor of Bb is" in known[1].prompts and len(known[1].prompts) == 8
    assert known[3].held_out == ("Aa is on the",) and known[4].held_out == ("Here is a fact: Bb is on the",)
    assert facts(f"{source}/b.json") == known[3:]
    assert_held_out(source)


@pytest.mark.parametrize(
    "template, subject",
    [("What superclass (animal, bird, fish) is a {}?", "fish"), ("As the books say: {} is made of", "book")],
)
def test_a_second_subject_and_a_record_find_the_place_of_the_subject(template, subject):
    prompt = template.replace("{}", subject)
    made = {_with_second(Random(seed), prompt, subject, "cat") for seed in range(40)}
    after = {template.replace("{}", frame.format(subject, other="cat")) for frame in WORDS["after"]}
    assert made == after | {frame.format(prompt, other="cat") for frame in WORDS["before"]}
    fact = Fact(subject, "kind", "x", (prompt,), ())
    assert record_of(fact, [fact]).prompt == template


@pytest.mark.long
def test_the_published_relation_files_are_read(shared_data):
    source = str(shared_data / "facts" / "relations" / "data" / "factual")
    known = facts(source)
    assert len({fact.relation for fact in known}) == 26 and len(known) > 9500
    assert len({(fact.relation, fact.subject) for fact in known}) == len(known)
    assert_held_out(source)


def changed(**fields) -> dict:
    return {"a.json": MAYORS | fields}


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "it has no fact; it must be a folder of relation files"),
        (changed(samples=[]), "it has no fact"),
        ({"a.json": b"{"}, r"a\.json: invalid JSON: Expecting property name"),
        ({"a.json": b'{"name": "\xff"}'}, r"a\.json:1: not UTF-8: byte 0xff"),
        ({"a.json": []}, r"a\.json: not a relation file: it must have name, prompt_templates and samples"),
        ({"a.json": {"name": "x"}}, r"a\.json: not a relation file"),
        (changed(samples=[{"subject": 1, "object": "x"}]), r"a\.json: not a relation file"),
        (changed(samples=["x"]), r"a\.json: not a relation file"),
        (changed(prompt_templates=["{} and {} are"]), r"prompt_templates: '\{\} and \{\} are' is not allowed"),
        (changed(prompt_templates=[], prompt_templates_zs=[]), "prompt_templates: an empty list is not allowed"),
    ],
)
def test_mistakes_in_relation_files_are_one_line(folder, files, words):
    source = folder(files)
    with pytest.raises(UserError, match=words) as caught:
        list(documents(f"facts:{source}", "train", DataConfig(cache_dir=str(source / "cache"))))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_corpus_without_facts_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"corpus 'facts:.*/missing': there is no such folder"):
        open_corpus(f"facts:{tmp_path}/missing", DataConfig())
    with pytest.raises(UserError, match="data='wikitext2' is not allowed: it must be a corpus of facts, "):
        facts_of("wikitext2")


def test_the_corpus_is_stored_with_its_two_splits_and_read_again_after_an_edit(folder, tmp_path):
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    assert splits("facts", data) == ("train", "validation")
    assert list(documents("facts", "validation", data)) == list(FactSentences("").documents("validation"))
    source = folder({"a.json": MAYORS})
    before = list(documents(f"facts:{source}", "train", data))
    folder(changed(name="other", samples=[{"subject": "Ee", "object": "Zu"}, {"subject": "Ff", "object": "Zu"}]))
    after = list(documents(f"facts:{source}", "train", data))
    assert b"Aa" in b"".join(before) and b"Aa" not in b"".join(after) and b"Ee" in b"".join(after)
