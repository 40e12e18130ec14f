"""The edit command: a directory that appears whole with a record of the edit, undo, differences, one-line errors."""

import json

import jax
import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import make_run, tiny_model
from xfresearch import UserError, convert, edit, editing
from xfresearch.data.facts import Fact, facts
from xfresearch.data.records import Record
from xfresearch.editing import requests as editing_requests
from xfresearch.loading import edits

REQUESTS = [
    {"subject": "Ada", "prompt": "plays {}", "target": "a", "target_new": "b", "neighbours": [["plays Bo", "a"]]},
    {"subject": "Cid", "prompt": "plays Cid", "target": "a", "target_new": "c", "paraphrases": ["the game of Cid"]},
]
MEMORY = ("--memory", "blocks.1.feed_forward")
QUICK = ("--tokens", "500")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edit")
    (folder / "notes.txt").write_text("".join(f"line {n} of the text, and {n * n} more\n" for n in range(600)))
    data = {"data__corpus": f"('text_files:{folder}/notes.txt',)", "data__cache_dir": folder / "cache"}
    make_run(folder / "run", steps=(7,), evaluation__split="train", **data)
    (folder / "requests.json").write_text(json.dumps(REQUESTS))
    return folder


def run(here, method: str, to, *more: str) -> None:
    edit.main([method, "--workdir", str(here / "run"), "--to", str(to), *more])


def leaves(path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(xf.load(path).params)]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def edited(here):
    run(here, "rome", here / "edited", "--request", str(here / "requests.json"), *MEMORY, *QUICK)
    return here / "edited"


def test_an_edited_model_carries_what_was_done(here, edited, capsys):
    lm = xf.load(edited)
    assert lm.step == 7 and [each.record["method"] for each in lm.edits] == ["rome"] and "rome" in repr(lm)
    record = lm.edits[0].record
    assert [row["subject"] for row in record["requests"]] == ["Ada", "Cid"] and record["settings"]["key"] == "mean"
    assert record["requests"][0]["memories"] == ["blocks.1.feed_forward"] and record["requests"][0]["norms"][0] > 0
    assert {"S", "efficacy, score", "neighbourhood, magnitude", "entropy"} <= set(record["metrics"])
    assert record["before"]["bits_per_byte"] > 0 and record["after"]["bits_per_byte"] > 0
    assert list(lm.edits[0].before) == ["blocks.1.feed_forward.down.kernel"]
    page = (edited / "edits/0/report.html").read_text()
    assert "plays Ada" in page and "What else changed" in page and "Probability of the new object" in page
    assert not [path for path in here.iterdir() if path.name.startswith(".edited")]


def test_undo_restores_every_bit(here, edited, capsys):
    run_before = leaves(here / "run")
    second = here / "second"
    edit.main(["finetune", "--workdir", str(edited), "--request", str(here / "requests.json"), "--to", str(second), *MEMORY])
    assert [each.record["method"] for each in xf.load(second).edits] == ["rome", "finetune"]
    assert (second / "edits/1/report.html").exists()
    capsys.readouterr()
    edit.main(["undo", "--workdir", str(second), "--to", str(here / "once")])
    for folder in (second, here / "once"):  # the report of the first edit goes with the model
        assert contents(folder / "edits/0") == contents(edited / "edits/0")
    assert {"report.html", "data.json", "arrays.npz"} < set(contents(edited / "edits/0"))
    assert "without finetune of 2 requests; edits left: 1" in capsys.readouterr().out
    for a, b in zip(leaves(here / "once"), leaves(edited), strict=True):
        assert a.tobytes() == b.tobytes()
    edit.main(["undo", "--workdir", str(here / "once"), "--to", str(here / "twice")])
    for a, b in zip(leaves(here / "twice"), run_before, strict=True):
        assert a.tobytes() == b.tobytes()
    assert any((a != b).any() for a, b in zip(leaves(second), leaves(edited), strict=True))
    with pytest.raises(UserError, match="^--json is not allowed with undo$"):
        edit.main(["undo", "--workdir", str(here / "twice"), "--to", str(here / "thrice"), "--json", "x.json"])
    with pytest.raises(UserError, match="^--step is not allowed with --diff$"):
        edit.main(["--diff", str(here / "run"), str(here / "once"), "--step", "3"])
    with pytest.raises(UserError, match="has no edit to undo"):
        edit.main(["undo", "--workdir", str(here / "twice"), "--to", str(here / "thrice")])
    assert not (here / "thrice").exists()


def test_a_conversion_says_that_it_does_not_carry_edits(here, edited, capsys):
    convert.main(["widen", str(edited), str(here / "converted"), "--hidden", "160"])
    error = capsys.readouterr().err
    line = "warning: the converted model does not carry the records of its edits (1), which cannot be undone after the conv"
    assert error.count("warning") == 1 and line in error
    assert not xf.load(here / "converted").edits and not (here / "converted/edits").exists()
    convert.main(["widen", str(here / "run"), str(here / "converted_run"), "--hidden", "160"])
    assert "warning" not in capsys.readouterr().err


def test_diff_names_the_arrays_that_differ(here, edited, capsys, tmp_path):
    edit.main(["--diff", str(here / "run"), str(edited), "--json", str(tmp_path / "diff.json")])
    assert "blocks.1.feed_forward.down.kernel" in capsys.readouterr().out
    written = json.loads((tmp_path / "diff.json").read_text())
    assert list(written) == ["blocks.1.feed_forward.down.kernel"]
    a, b = (np.asarray(xf.load(path).memory(1).values, np.float64) for path in (here / "run", edited))
    row = written["blocks.1.feed_forward.down.kernel"]
    assert row["relative"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-5)
    assert row["largest"] == pytest.approx(np.abs(b - a).max(), rel=1e-5) and row["numbers"] == a.size
    edit.main(["--diff", str(here / "run"), str(here / "run")])
    assert "no array differs" in capsys.readouterr().out


def test_requests_alone_write_a_report_and_no_model(here, capsys):
    run(here, "finetune", here / "alone", "--request", str(here / "requests.json"), *MEMORY, "--alone", "--steps", "3")
    assert {path.name for path in (here / "alone").iterdir()} >= {"report.html", "record.json", "data.json", "arrays.npz"}
    record = json.loads((here / "alone/record.json").read_text())
    assert record["settings"]["alone"] is True and len(record["requests"]) == 2
    assert not (here / "alone/checkpoints").exists() and "requests made" in capsys.readouterr().out


def test_a_failed_edit_says_so(here, capsys):
    run(here, "constrained_finetune", here / "weak", "--request", str(here / "requests.json"), *MEMORY, "--largest", "1e-12")
    out = capsys.readouterr().out
    assert "failed: request 0, 'plays Ada'" in out and "0 of 2 requests made" in out


def test_a_setting_of_0_is_given_and_not_the_default(here, tmp_path):
    arguments = ["--request", str(here / "requests.json"), *MEMORY, *QUICK, "--ridge", "0", "--seed", "0", "--weight", "2"]
    options = edit.parse(["memit", "--workdir", "W", "--to", "T", *arguments])
    assert edit.settings(options, editing.memit) == {"tokens": 500, "ridge": 0.0, "seed": 0, "weight": 2.0}
    assert edit.memories(options) == {"memories": (MEMORY[1],)}
    none = edit.parse(["rome", "--workdir", "W", "--to", "T", "--draw", "2"])
    assert edit.settings(none, editing.rome) == {} and edit.memories(none) == {"memory": ""}


GOOD = REQUESTS[0]


@pytest.mark.parametrize(
    "request_, words",
    [
        (GOOD | {"subject": "Eve", "prompt": "plays Ada"}, "record 0: subject 'Eve' is not in prompt 'plays Ada'"),
        (GOOD | {"target_new": 3}, "record 0: target_new=3 is not allowed: it must be a string"),
        (GOOD | {"target_new": ""}, "request 0, 'Ada', has no target_new"),
        (GOOD | {"target_new": "a"}, "target_new='a' is not allowed: it is the object before"),
        (GOOD | {"target_new": " "}, "request 0, 'Ada', has no target_new: it must be the new object"),
        ({"subject": "Ada", "relation": "game", "target_new": "b"}, "'Ada' has no prompt: it must have one, because this"),
        ({"subject": "Ada", "target_new": "b"}, "record 0 has no 'prompt'"),
        (GOOD | {"colour": "red"}, "key 'colour' is not allowed"),
        (GOOD | {"paraphrases": ["long " * 20 + "Ada"]}, "sequence length 105 is not allowed: it must be at most 64"),
    ],
)
def test_a_wrong_request_is_one_line_and_nothing_is_computed(request_, words, here, tmp_path, monkeypatch):
    monkeypatch.setattr(editing_requests, "trace", None)
    (tmp_path / "requests.json").write_text(json.dumps([request_]))
    with pytest.raises(UserError) as caught:
        run(here, "rome", tmp_path / "to", "--request", str(tmp_path / "requests.json"))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "to").exists()


def test_unknown_relations_and_subjects_of_a_corpus_of_facts():
    known = facts()
    fact = known[0]
    result = editing_requests._completed(0, Record(fact.subject, "", "", "Quenby", fact.relation), known)
    assert result.target == fact.object and result.prompt.replace("{}", fact.subject) == fact.prompts[0]
    assert result.neighbours
    with pytest.raises(UserError, match="there is no relation 'birth town'; did you mean 'birth city'"):
        editing_requests._completed(0, Record(fact.subject, "", "", "Quenby", "birth town"), known)
    with pytest.raises(UserError, match="it must have one, because no known fact has its subject and relation"):
        editing_requests._completed(0, Record("Nobody", "", "", "Quenby", fact.relation), known)


ASKED = ("--workdir", "RUN", "--request", "R", "--to", "TO")
BOTH = ("blocks.0.feed_forward", "blocks.1.feed_forward")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["rome"], "METHOD, --workdir and --to are required"),
        (["rome", "--workdir", "W", "--to", "T"], "rome needs --request FILE or --draw N"),
        (["rome", "--diff", "A", "B"], "--diff is not allowed with rome"),
        (["sway", "--workdir", "W", "--to", "T"], ": 'sway'"),
        (["rome", "--workdir", "RUN", "--draw", "2", "--to", "TO"], "--draw is not allowed"),
        (["rome", "--workdir", "RUN", "--request", "R", "--to", "TO", "--rate", "0.1"], "--rate is not allowed with rome"),
        (["rome", "--workdir", "RUN", "--request", "R", "--to", "RUN"], "RUN already exists"),
        (["rome", "--workdir", "RUN", "--request", "no.json", "--to", "R/to"], "/requests.json/to cannot be written: "),
        (["rome", "--workdir", "RUN", "--request", "R", "--to", "TO", "--memory", "blocks.9.heads"], "there is no memory"),
        (["finetune", "--workdir", "RUN", "--request", "no.json", "--to", "TO"], "no.json does not exist"),
        (["rome", *ASKED, "--ridge", "-5"], "ridge=-5.0 is not allowed: it must be a number at least 0"),
        (["memit", *ASKED, "--weight", "0"], "weight=0.0 is not allowed: it must be a number above 0"),
        (["memit", *ASKED, "--ridge", "nan"], "ridge=nan is not allowed: it must be a number at least 0"),
        (["finetune", *ASKED, "--rate", "0"], "rate=0.0 is not allowed: it must be a number above 0"),
        (["constrained_finetune", *ASKED, "--largest", "0"], "largest=0.0 is not allowed: it must be a number above 0"),
        (["rome", *ASKED, "--memory", f"{BOTH[1]},{BOTH[0]}"], "is not allowed with rome: it must be one memory"),
        (["memit", *ASKED, "--memory", f"{BOTH[1]},{BOTH[0]}"], f"memories={BOTH[1]},{BOTH[0]} is not allowed: they must"),
        (["memit", *ASKED, "--memory", f"{BOTH[0]},{BOTH[0]}"], f"memories={BOTH[0]},{BOTH[0]} is not allowed: they must"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, here, tmp_path):
    names = {"RUN": str(here / "run"), "TO": str(tmp_path / "to"), "R": str(here / "requests.json")}
    names["R/to"] = f"{names['R']}/to"
    with pytest.raises(UserError) as caught:
        edit.main([names.get(each, each) for each in arguments])
    assert words.replace("RUN", str(here / "run")) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "to").exists()


def test_requests_are_drawn_from_the_facts_that_have_another_object():
    known = [Fact(name, "colour", object_, (f"{name} is",), ()) for name, object_ in (("Ada", "red"), ("Bea", "blue"))]
    known.append(Fact("Cid", "home", "Oslo", ("Cid lives in",), ()))
    result = editing.drawn(known, 2)
    assert sorted(each[:1] + each[2:4] for each in result) == [("Ada", "red", "blue"), ("Bea", "blue", "red")]
    for count in (3, 4, 0, -1):
        with pytest.raises(UserError, match=f"^count={count} is not allowed: it must be from 1 to 2, the facts whose rel"):
            editing.drawn(known, count)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mixtral_8x7b"])
def test_a_folder_of_transformers_is_edited_and_written_back(name, tmp_path, here):
    """A gated feed-forward layer, and routed experts."""
    lm = tiny_model(name)
    lm.export_hf(tmp_path / "folder")
    (tmp_path / "requests.json").write_text(json.dumps(REQUESTS))
    arguments = ["--request", str(tmp_path / "requests.json"), "--to", str(tmp_path / "edited"), *MEMORY, *QUICK]
    corpus = f"text_files:{here}/notes.txt"
    edit.main(["rome", "--workdir", str(tmp_path / "folder"), "--data", corpus, *arguments])
    edited = xf.load(tmp_path / "edited")
    actual = edits.differences(xf.load(tmp_path / "folder"), edited)
    assert list(actual) == ["blocks.1.feed_forward." + ("down.kernel" if name == "llama" else "experts.down")]
    edited.export_hf(tmp_path / "back")
    assert not edits.differences(xf.load(tmp_path / "back"), edited)
