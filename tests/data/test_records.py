"""Records of facts: all four forms, the generated set, and one-line errors."""

import json
import re
from pathlib import Path

import pytest

from xfresearch.data.facts import facts
from xfresearch.data.records import Record, read_record, read_records, records
from xfresearch.runtime.errors import UserError

EDITING = Path(__file__).parents[3] / "shared" / "data" / "editing"
OURS = {"subject": "Ada", "prompt": "{} plays the", "target": "flute", "target_new": "harp"}
COUNTERFACT = {
    "requested_rewrite": {
        "prompt": "{} plays the",
        "subject": "Ada",
        "target_true": {"str": "flute"},
        "target_new": {"str": "harp"},
        "relation_id": "P1",
    },
    "paraphrase_prompts": ["Ada, who plays the"],
    "neighborhood_prompts": ["Bob plays the"],
}


KNOWEDIT = {"subject": "Ada", "prompt": "Ada plays the", "target_new": "harp", "ground_truth": ["flute"], "locality": {}}


def written(path, *rows):
    path.write_text(json.dumps(list(rows)))
    return path


def test_the_forms_have_one_meaning(tmp_path):
    flat = {"subject": "Ada", "prompt": "Ada plays the", "target_new": "harp", "ground_truth": "flute"}
    flat |= {"rephrase_prompt": "Ada, who plays the", "locality_prompt": "Bob plays the", "locality_ground_truth": "flute"}
    zsre = {"subject": "Ada", "src": "Ada plays the", "pred": "flute", "alt": "harp", "rephrase": "Ada, who plays the"}
    zsre |= {"loc": "Bob plays the", "loc_ans": "flute"}
    ours = OURS | {"paraphrases": ["Ada, who plays the"], "neighbours": [["Bob plays the", "flute"]]}
    result = read_records(written(tmp_path / "a.json", ours, flat, zsre, COUNTERFACT))
    expected = Record("Ada", "{} plays the", "flute", "harp", "", ("Ada, who plays the",), (("Bob plays the", "flute"),))
    assert result[:3] == [expected] * 3 and result[0].text == "Ada plays the"
    assert result[3] == expected._replace(relation="P1")
    known = {"subject": "Ada", "attribute": "flute", "template": "{} plays", "prompt": "Ada plays the", "relation_id": "P2"}
    assert records(str(written(tmp_path / "b.json", known))) == [Record("Ada", "{} plays the", "flute", "", "P2")]


def test_the_forms_of_several_answers_and_edits(tmp_path):
    """KnowEdit's answers are lists with aliases; a case of MQuAKE is several edits, which its questions follow from."""
    locality = {"Relation_Specificity": [{"prompt": "Ada was born in", "ground_truth": [["Ulm", "Ulm city"]]}]}
    reasoning = [{"prompt": "Ada's instrument has", "ground_truth": [["strings"]]}, {"prompt": "a", "ground_truth": []}]
    follow = {"Reasoning": reasoning, "Subject_Aliasing": [{"prompt": "Adelaide plays the", "ground_truth": ["harp"]}]}
    knowedit = KNOWEDIT | {"locality": locality, "portability": follow, "rephrase_prompt": "Ada, who plays the"}
    first = {"prompt": "{} plays the", "subject": "Ada", "target_true": None, "target_new": {"str": "harp"}}
    second = {"prompt": "{} lives in", "subject": "Bob", "target_true": {"str": "Ulm"}, "target_new": {"str": "Rome"}}
    mquake = {"requested_rewrite": [first, second], "questions": ["Q?", "R?"], "answer": "x", "new_answer": "y"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (knowedit, mquake)))
    result = records(str(tmp_path / "a.jsonl"))
    paraphrases = ("Ada, who plays the", "Adelaide plays the")
    consequences = (("Ada's instrument has", "strings", ""),)
    assert result[0] == Record(
        "Ada", "{} plays the", "flute", "harp", "", paraphrases, (("Ada was born in", "Ulm"),), consequences
    )
    assert result[1] == Record("Ada", "{} plays the", "", "harp")
    assert result[2] == Record("Bob", "{} lives in", "Ulm", "Rome", consequences=(("Q?", "y", "x"), ("R?", "y", "x")))


@pytest.mark.parametrize(
    "subject, prompt, filled",
    [
        ("Rome", "Romeo visits Rome, which lies in", "Romeo visits {}, which lies in"),
        ("France", "In Frances' town of Paris, France's capital,", "In Frances' town of Paris, {}'s capital,"),
        ("man", "A woman and a human met a man_ and a man", "A woman and a human met a man_ and a {}"),
        ("Cafe", "Cafe\u0301 or Cafe?", "Cafe\u0301 or {}?"),
        ("C++", "C++11 is newer than C++ by", "{}11 is newer than C++ by"),
        ("\u6771\u4eac", "\u6771\u4eac\u306e\u56fd\u306f", "{}\u306e\u56fd\u306f"),
        ("\uc11c\uc6b8", "\uc11c\uc6b8\uc740", "{}\uc740"),
    ],
)
def test_a_subject_is_whole_words(subject, prompt, filled):
    assert read_record("record 0", {"subject": subject, "prompt": prompt}).prompt == filled


def test_objects_lose_the_spaces_around_them():
    """One space joins a prompt and its object, wherever it is edited or measured."""
    row = OURS | {"target": " flute", "target_new": "harp ", "neighbours": [["Bob plays the", " flute"]]}
    result = read_record("record 0", row | {"consequences": [["It has", " strings", "holes "]]})
    assert (result.target, result.target_new) == ("flute", "harp")
    assert result.neighbours == (("Bob plays the", "flute"),) and result.consequences == (("It has", "strings", "holes"),)


def test_the_generated_facts_are_records():
    result, known = records("facts"), facts()
    assert len(result) == len(known)
    assert result[0].text == known[0].prompts[0] and result[0].target == known[0].object
    assert result[0].paraphrases[: len(known[0].held_out)] == known[0].held_out
    near = [(record, prompt, answer) for record in result[:50] for prompt, answer in record.neighbours]
    assert near and all(answer == record.target and record.subject not in prompt for record, prompt, answer in near)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"subject": "Ada"}, "record 0 has no 'prompt': the keys are subject"),
        (OURS | {"subject": "Bob", "prompt": "Ada plays"}, "record 0: subject 'Bob' is not in prompt 'Ada plays'"),
        (OURS | {"target": 3}, "record 0: target=3 is not allowed: it must be a string"),
        (OURS | {"subject": ""}, "record 0: subject='' is not allowed"),
        (OURS | {"colour": "red"}, "record 0: key 'colour' is not allowed: it must be one of subject, prompt"),
        (COUNTERFACT | {"requested_rewrite": {}}, "record 0 has no 'requested_rewrite.subject': the keys are none"),
        (COUNTERFACT | {"requested_rewrite": "a"}, 'record 0: requested_rewrite="a" is not allowed: it must be a JSON'),
        (COUNTERFACT | {"requested_rewrite": []}, "record 0: requested_rewrite=[] is not allowed: it must be at least"),
        (COUNTERFACT | {"paraphrase_prompts": ["a", 3]}, "record 0: paraphrase_prompts[1]=3 is not allowed: it must be"),
        (COUNTERFACT | {"neighborhood_prompts": "a"}, 'record 0: neighborhood_prompts="a" is not allowed: it must be'),
        (KNOWEDIT | {"locality": ["a"]}, 'record 0: locality=["a"] is not allowed: it must be a JSON object'),
        (KNOWEDIT | {"locality": {"a": [{"prompt": "b"}]}}, "record 0 has no 'locality.a[0].ground_truth': the keys are"),
        (OURS | {"neighbours": [["a"]]}, 'record 0: neighbours=[["a"]] is not allowed: it must be a list of pairs of'),
        (OURS | {"paraphrases": "a"}, 'record 0: paraphrases="a" is not allowed: it must be a list of strings'),
        (OURS | {"references": None}, "record 0: references=null is not allowed: it must be a list of strings"),
        (OURS | {"prompt": "Adam met Adaline"}, "record 0: subject 'Ada' is not in prompt 'Adam met Adaline', but for"),
        ("text", 'record 0 is "text": it must be a JSON object'),
    ],
)
def test_mistakes_are_one_line(tmp_path, row, words):
    with pytest.raises(UserError, match=re.escape(words).replace("record 0", ".*record 0")) as caught:
        read_records(written(tmp_path / "a.json", row))
    assert "\n" not in str(caught.value)


def test_files_that_are_not_lists_of_records(tmp_path):
    cases = (("[", "invalid JSON"), ("a text", "invalid JSON"), ("[]", "at least one"), ('{"a": 1}', "must be a JSON list"))
    for text, words in cases:
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(UserError, match=words):
            read_records(tmp_path / "a.json")
    with pytest.raises(UserError, match="does not exist"):
        records(str(tmp_path / "b.json"))
    with pytest.raises(UserError, match="corpus of facts"):
        records("python_stdlib")


@pytest.mark.parametrize(
    "name, count", [("counterfact-edit.json", 10_000), ("zsre_mend_train_1k.json", 1000), ("known_1000.json", 1209)]
)
def test_published_files_are_read(name, count):
    if not (EDITING / name).exists():
        pytest.skip(f"{EDITING / name} is not here")
    result = read_records(EDITING / name)
    assert len(result) == count and all(record.subject in record.text and record.target for record in result)
