"""The ledger shows whatever may change a verdict: other statistics, runs of other studies, looks that are dropped."""

import ast
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from docs import studies
from tests.studies.test_design import STUDY
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object
from xfresearch.studies import preregistration as ledger

# The words of ledger.STATISTICS, and a digest of the code behind them, without comments. A change of the code that may
# change a verdict changes the words, so that studies have a new version. The failure of the first test prints the digest.
CODE = ("verdicts", "simultaneous", "rates")
STATISTICS = "simultaneous intervals of all arms and rungs, variances drawn, rates resampled, no parabola over a cliff, 5 %"
DIGEST = "75cce449949f54da"


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


def write(folder, content: dict) -> None:
    (folder / ledger.LEDGER).write_text(json.dumps(content))


def test_a_change_by_hand_of_anything_is_refused(tmp_path, monkeypatch):
    """Every value of the file, one at a time, and every version that is left out."""
    other, own = tmp_path / "other", tmp_path / "own"
    ledger.begin(replace(STUDY, margin=0.5), other, (), ())
    ledger.conclude(other, ["b is better"])
    monkeypatch.setattr(ledger, "read_runs", lambda path: {"known": {}, "another": {}})
    for study, reused in ((STUDY, ()), (replace(STUDY, margin=0.3), (str(other),))):
        ledger.begin(study, own, ({"fingerprint": "known"},), reused)
        ledger.conclude(own, ["a is better"])
    content = read_object(own / ledger.LEDGER)
    assert [version.get("of") for version in ledger.read(own)] == [None, "other", None]
    changed = [*_changed(content), *({**content, "versions": _without(content["versions"], at)} for at in range(3))]
    first, copied, last = content["versions"]
    stated = last.keys() - {"verdicts"}  # which the file's digest covers, and the next version
    of_a_version = [[first, copied, {**last, name: other}] for name in stated for other in _changed(last[name])]
    of_a_version += [[first, other, last] for other in _changed(copied)]
    digested = [{"versions": versions, "digest": ledger._hashed(versions)} for versions in of_a_version]
    assert len(changed) > 60 and len(digested) > 60
    for each in [*changed, *digested, {"versions": content["versions"]}]:
        write(own, each)
        with pytest.raises(UserError, match="ledger.json"):
            ledger.read(own)
    write(own, content)
    assert len(ledger.read(own)) == 3


def _changed(value):
    """Copies of a JSON value, each with another one in one place."""
    if isinstance(value, dict):
        for key in value:
            yield from ({**value, key: other} for other in _changed(value[key]))
            yield from [{name: value[name] for name in value if name != key}] if isinstance(value[key], str) else []
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in _changed(item))
            yield _without(value, at)
    else:
        yield f"{value} " if isinstance(value, str) else (value or 0) + 1


def _without(values: list, at: int) -> list:
    return values[:at] + values[at + 1 :]


@pytest.mark.parametrize("folder", sorted(path.parent for path in studies.DATA.glob("*/ledger.json")), ids=lambda p: p.name)
def test_ledgers_of_the_pages_are_whole_and_a_new_version_covers_the_earlier_ones(folder, tmp_path):
    shutil.copy(folder / ledger.LEDGER, tmp_path)
    before = ledger.read(tmp_path)
    ledger.begin(STUDY, tmp_path, (), ())
    content = read_object(tmp_path / ledger.LEDGER)
    assert ledger.read(tmp_path)[:-1] == before
    content["versions"][0]["seen"]["others"] += 1
    content["digest"] = ledger._hashed(content["versions"])
    write(tmp_path, content)
    with pytest.raises(UserError, match="which is not that of its design, date and runs"):
        ledger.read(tmp_path)


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
