"""Saved answers to tasks are compared item by item; what cannot be compared is said."""

import math

import pytest

from xfresearch.comparing import tasks


def answers(questions: str = "q", lower_is_better=(), **values) -> dict:
    return {"questions": questions, "values": values, "lower_is_better": list(lower_is_better)}


RIGHT = {"piqa": answers(acc=[1.0] * 15 + [0.0] * 5)}
WRONG = {"piqa": answers(acc=[0.0] * 15 + [1.0] * 5)}


def test_each_run_is_compared_with_the_first():
    result, notes = tasks.compare({"a": RIGHT, "b": WRONG, "c": RIGHT}, 0.0)
    pairs = result["piqa"]["acc"]
    assert notes == [] and list(pairs) == ["b", "c"]
    assert (pairs["b"]["value"], pairs["b"]["reference"], pairs["b"]["difference"]) == (0.25, 0.75, -0.5)
    assert (pairs["b"]["higher"], pairs["b"]["lower"]) == (5, 15)
    assert pairs["b"]["p_holm"] == 2 * pairs["b"]["p"] == pytest.approx(0.0828, abs=1e-4)  # two runs: two tests
    assert pairs["b"]["verdict"] == pairs["c"]["verdict"] == "no difference shown"


def test_tasks_are_several_tests():
    alone, _ = tasks.compare({"a": RIGHT, "b": WRONG}, 0.0)
    assert alone["piqa"]["acc"]["b"]["verdict"] == "worse on this task"
    both, _ = tasks.compare({"a": RIGHT | {"boolq": RIGHT["piqa"]}, "b": WRONG | {"boolq": RIGHT["piqa"]}}, 0.0)
    assert both["piqa"]["acc"]["b"]["p_holm"] == 2 * alone["piqa"]["acc"]["b"]["p"]
    assert both["piqa"]["acc"]["b"]["verdict"] == "no difference shown"


def test_the_margin_applies_to_shares_of_correct_answers_only():
    one = {"lambada": answers(acc=[1.0, 0.0] * 50, log_likelihood=[-1.0, -2.0] * 50)}
    result, _ = tasks.compare({"a": one, "b": one}, 0.05)
    assert result["lambada"]["acc"]["b"]["verdict"] == "equal within 0.05 on this task"
    assert result["lambada"]["log_likelihood"]["b"]["verdict"] == "no difference shown"


def test_lower_can_be_better():
    one, other = ({"bias": answers(lower_is_better=["score"], score=[x + i / 100 for i in range(9)])} for x in (1, 0))
    result, _ = tasks.compare({"a": one, "b": other}, 0.0)
    assert result["bias"]["score"]["b"]["verdict"] == "better on this task"


def test_metrics_without_a_finite_number_for_every_item_are_left_out():
    """Values of metrics such as F1 are pairs, some tasks have values for some items only, and JSON has null for NaN."""
    one = {"squad": answers("s"), "piqa": answers(acc=[1.0, 0.0], odd=[None, 1.0], wild=[math.nan, 1.0], some=[1.0])}
    other = {"squad": answers("s"), "piqa": answers(acc=[1.0, 0.0], odd=[1.0, 1.0], wild=[1.0, 1.0], some=[1.0, 1.0])}
    result, _ = tasks.compare({"a": one, "b": other}, 0.0)
    assert list(result) == ["piqa"] and list(result["piqa"]) == ["acc"]


def test_what_cannot_be_compared_is_noted():
    runs = {"a": RIGHT | {"only": RIGHT["piqa"]}, "b": {"piqa": answers("r", acc=[1.0] * 20)}, "c": {"new": RIGHT["piqa"]}}
    result, notes = tasks.compare(runs, 0.0)
    assert result == {}
    assert notes == [
        "c was not evaluated on piqa",
        "piqa has different prompts or targets for a and b",
        "b was not evaluated on only",
        "c was not evaluated on only",
        "a was not evaluated on new",
        "b was not evaluated on new",
    ]
    assert tasks.compare({}, 0.0) == ({}, [])
