"""Saved answers: all complete lines are read again after a kill, whatever is left of the last line."""

import pytest

from xfresearch.harness.items import Items
from xfresearch.runtime.errors import UserError

ANSWERS = {"a": [-1.25, True], "b": "a text\nof two lines, naïve", "c": -0.1 + 1e-17}


def test_saved_answers_are_read_again(tmp_path):
    path = tmp_path / "deep" / "items.jsonl"
    items = Items(path)
    assert not items and not path.exists()
    items.add({"a": ANSWERS["a"]})
    assert Items(path) == {"a": ANSWERS["a"]}
    items.add(ANSWERS)
    assert Items(path) == items == ANSWERS


@pytest.mark.parametrize("left", range(1, 60, 7))
def test_an_incomplete_line_is_skipped_and_the_next_answers_start_a_new_line(tmp_path, left):
    path = tmp_path / "items.jsonl"
    Items(path).add(ANSWERS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-left])
    result = Items(path)
    lines = whole[:-left].count(b"\n")
    assert result == dict(list(ANSWERS.items())[:lines])
    result.add({"d": 4, **ANSWERS})
    assert Items(path) == {**ANSWERS, "d": 4}


def test_lines_that_are_not_pairs_are_skipped(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'5\n[1]\n\xff\xfe\n["a", 1]\n{"a": 2}\n\n')
    assert Items(path) == {"a": 1}


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Items().add(ANSWERS)
    assert not list(tmp_path.iterdir())


def test_the_error_names_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/items\.jsonl cannot be written"):
        Items(tmp_path / "file" / "items.jsonl").add(ANSWERS)
