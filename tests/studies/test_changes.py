"""A study of changes: --arms, and xf.study. The file that is made, and what it finds."""

import re

import pytest

import xfresearch as xf
from tests.studies.tiny import time_nothing
from xfresearch.runtime.errors import UserError
from xfresearch.studies import changes, design, study_plan
from xfresearch.studies.allocation import Cell
from xfresearch.study import main as study_main

BLOCK = "model.blocks.main"
SMALL = """
from xfresearch.configs import quickstart


def get_config():
    config = quickstart.get_config("tiny")
    config.model.width, config.model.depth, config.steps = 16, 1, 12
    return config
"""


def read(tmp_path, *arms: str, base: str = "gpt2:tiny", corpus: str = "") -> design.Study:
    return design.read(["--config", changes.write(str(tmp_path), changes.file_of(arms, base, corpus))])


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"note {number}: some text to read\n" * 20)
    return folder


def test_the_file_has_each_change_as_an_arm_with_whole_keys(tmp_path):
    words = ("relu2: feed_forward.kind=relu2 feed_forward.bias=False", "attention.bias=('query', 'key')", "width=48")
    arms = read(tmp_path, *words).arms
    assert arms.pop("base") == ()
    assert arms.pop("relu2") == (f"{BLOCK}.feed_forward.kind=relu2", f"{BLOCK}.feed_forward.bias=False")
    assert arms == {"bias-query-key": (f"{BLOCK}.attention.bias=('query', 'key')",), "width-48": ("model.width=48",)}


def test_arms_have_equal_flops_by_their_width_or_their_updates(tmp_path):
    made = read(tmp_path, "feed_forward.kind=swiglu", "depth=3", "layout=attention_only")
    planned = study_plan.make(made)  # which refuses arms of another cost
    solved = {cell.arm: each.solved for cell, each in planned.matched.items()}
    assert solved["swiglu"] == f"{BLOCK}.feed_forward.hidden=88"
    assert re.match(r"steps=\d+", solved["depth-3"]) and re.match(r"steps=\d+", solved["attention_only"])
    base = planned.matched[Cell("tiny", "base")]
    tokens = base.config.steps * base.config.batch_size * base.config.sequence_length
    assert changes.TOKENS <= tokens / base.parameters < changes.TOKENS + 1
    assert made.seeds == 5 and made.rates == (0.005, 0.01, 0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["relu2"], "--arms='relu2' is not allowed: it must be KEY=VALUE"),
        (["a: norm=rms", "a: norm=none"], "there is an arm 'a' already"),
        (["feed_foward.kind=relu2"], "no key 'feed_foward'; did you mean 'feed_forward'"),
        (["norm=rsm"], "arm rsm at size tiny: .*'rms'"),
    ],
)
def test_a_mistake_in_a_change_is_one_line(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        study_plan.make(read(tmp_path, *words))


def test_a_plan_shows_the_file_and_writes_none(tmp_path, notes, capsys):
    study_main(["--arms", "norm=layer", "--corpus", str(notes), "--workdir", str(tmp_path / "layer"), "--plan"])
    shown = capsys.readouterr().out
    assert "def get_config()" in shown and str(notes) in shown and "16: " in shown
    assert not list((tmp_path / "layer").rglob("*"))


def test_it_runs_from_python_to_a_verdict_and_goes_on_with_its_own_file_only(tmp_path, notes, monkeypatch, capsys):
    monkeypatch.setattr(changes, "TOKENS", 0)
    time_nothing(monkeypatch)
    arms = {"layer": {"norm": "layer"}}
    smaller = {"seeds": 2, "rates": (0.01, 0.02), "extensions": 0}
    (tmp_path / "small.py").write_text(SMALL)
    made = {"base": str(tmp_path / "small.py"), "workdir": str(tmp_path / "layer"), "corpus": str(notes)}
    called = {**made, "overrides": smaller}
    found = xf.study(arms, **called)
    assert "time       some" in capsys.readouterr().out.split("report")[0]
    assert repr(found).startswith("layer") and found.report.is_file()
    assert [row["arm"] for row in found.table] == ["base", "layer"] and "verdict" in found.table[1]
    written = (tmp_path / "layer" / "study.py").read_text()
    monkeypatch.setattr("xfresearch.studies.trials.run_trial", None)  # nothing trains again
    assert repr(xf.study(arms, **called)) == repr(found)
    (tmp_path / "layer" / "study.py").write_text(written.replace("layer", "none"))
    with pytest.raises(UserError, match="is the file of another study, or was changed: --config .*study.py goes on"):
        xf.study(arms, **called)


def test_flags_of_arms_need_arms(tmp_path):
    for flags in (["--base", "gpt2:tiny"], ["--corpus", "notes"], ["--arms", "norm=layer", "--config", "studies/w_o"]):
        with pytest.raises(UserError, match="allowed"):
            study_main([*flags, "--workdir", str(tmp_path)])
