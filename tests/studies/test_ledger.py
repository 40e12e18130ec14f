"""The ledger shows whatever may change a verdict: other statistics, runs of other studies, looks that are dropped."""

import ast
import hashlib
from dataclasses import replace
from pathlib import Path

from docs import studies
from tests.studies.test_design import STUDY
from xfresearch.studies import ledger

# The words of ledger.STATISTICS, and a digest of the code behind them, without comments. A change of the code that may
# change a verdict changes the words, so that studies have a new version. The failure of the first test prints the digest.
CODE = ("simultaneous", "rates", "interim", "growth")
STATISTICS = "simultaneous intervals of all arms and rungs, variances drawn, rates resampled, no parabola over a cliff, 5 %"
DIGEST = "fe3131e4168a2263"


def digest_of_code() -> str:
    trees = [ast.parse(Path(f"xfresearch/studies/{name}.py").read_text()) for name in CODE]
    return hashlib.sha256(repr(list(map(plain, trees))).encode()).hexdigest()[:16]


def plain(node):
    """A syntax tree as tuples and lists, without docstrings: the same in all versions of Python, of which each unparses
    it to other text. Later ones have more fields, which are empty here, and 3.12.1 has empty texts in f-strings."""
    if isinstance(node, list):
        return list(map(plain, node))
    if not isinstance(node, ast.AST):
        return node
    given = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        given["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):
        given["values"] = [each for each in node.values if getattr(each, "value", None) != ""]
    return type(node).__name__, [(name, plain(value)) for name, value in given.items() if value not in (None, [])]


def shown(folder) -> list[list[str]]:
    """What the report says of the changes of each version."""
    return [each["changes"] for each in ledger.conclude(folder, ledger.read(folder)[-1].get("verdicts") or ["a is better"])]


def test_other_statistics_have_other_words():
    assert (ledger.STATISTICS, digest_of_code()) == (STATISTICS, DIGEST), digest_of_code()


def test_other_statistics_make_a_version(tmp_path, monkeypatch):
    ledger.begin(STUDY, tmp_path, (), ())
    monkeypatch.setattr(ledger, "STATISTICS", "others")
    ledger.begin(STUDY, tmp_path, (), ())
    assert shown(tmp_path)[1] == [f"statistics: {STATISTICS} -> others"]


def test_verdicts_stay_and_others_make_a_version(tmp_path):
    ledger.begin(STUDY, tmp_path, (), ())
    ledger.conclude(tmp_path, ["a is better"])
    assert len(ledger.conclude(tmp_path, ["a is better"])) == 1
    first, second = ledger.conclude(tmp_path, ["a is worse"])
    assert (first["verdicts"], second["verdicts"]) == (["a is better"], ["a is worse"])
    assert second["changes"] == ["nothing: computed again"] and len(ledger.read(tmp_path)) == 2


def test_looks_that_are_dropped_are_a_change(tmp_path):
    ledger.begin(replace(STUDY, looks=(2,)), tmp_path, (), ())
    ledger.begin(STUDY, tmp_path, (), ())
    assert shown(tmp_path)[1] == ["looks: [2] -> none"]


def test_a_study_that_is_reused_later_is_a_change_with_its_versions(tmp_path, monkeypatch):
    other, own = tmp_path / "other", tmp_path / "own"
    ledger.begin(replace(STUDY, margin=0.5), other, (), ())
    monkeypatch.setattr(ledger, "read_runs", lambda path: {"known": {}} if Path(path).name == "other" else {})
    ledger.begin(STUDY, own, (), ())
    for _ in range(2):  # the second time, nothing is new
        ledger.begin(STUDY, own, ({"fingerprint": "known"},), (str(other),))
    first, copied, second = ledger.read(own)
    assert (copied["of"], copied["design"]["margin"]) == ("other", 0.5)
    assert second["seen"] == {"runs": ["known"], "others": 0, "directories": ["other"]}
    assert shown(own)[2][-1] == "reuse: none -> other"


def test_a_study_of_the_pages_that_has_ended_takes_runs_of_no_other_than_its_ledger_names():
    """Otherwise the command of its page would make a new version of its ledger."""
    assert studies._others("norms") == ["docs/data/studies/w_q"] and studies._others("w_o_small") == []
    assert len(studies._others("a new one")) == len(list(studies.DATA.glob("*/runs.json")))
