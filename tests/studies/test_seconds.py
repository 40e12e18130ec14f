"""The seconds of updates: of which configs they are measured, and what studies make of them."""

from dataclasses import replace

import pytest

from tests.studies.tiny import fake_times, run
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object
from xfresearch.studies import design, matching, trials
from xfresearch.studies.allocation import Cell


def test_equal_seconds_are_those_of_the_first_start(config, tmp_path, monkeypatch):
    speeds = {"base": 1.0, "parallel": 0.75}
    fake_times(monkeypatch, speeds)
    size = "('steps=3','model.width=16','model.depth=1')"
    flags = "--config.match=seconds", "--config.solve=steps", f"--config.sizes.tiny={size}"
    with pytest.raises(UserError, match="--job=0 is not allowed with config.match='seconds' before updates were timed"):
        run(config, tmp_path, *flags, "--job=0")
    planned = []
    monkeypatch.setattr(trials, "conduct", lambda ladder, store, solved, *_: planned.append(solved) or {})
    run(config, tmp_path, *flags, "--time")  # measures and keeps them
    run(config, tmp_path, *flags, "--job=0")
    speeds["parallel"] = 3.0
    run(config, tmp_path, *flags, "--job=1")
    for solved in planned:
        arm = solved[Cell("tiny", "parallel")]
        assert arm.config.steps == 4 and arm.mismatch == 0
    assert len(planned) == 2
    updates = read_object(tmp_path / "seconds.json")["updates"]
    assert {cell: each["seconds"] for cell, each in updates.items()} == {"tiny/base": 1.0, "tiny/parallel": 0.75}


def test_an_arm_that_is_added_is_timed_beside_the_baseline(config, monkeypatch):
    fake_times(monkeypatch, {"base": 0.5, "parallel": 0.5, "no_norm_between": 0.75})  # the machine is twice as fast now
    study = design.read(config)
    study.arms["other"] = ("model.blocks.main.layout=no_norm_between",)
    base, parallel, other = (Cell("tiny", arm) for arm in study.arms)
    known = {base: 1.0, parallel: 0.75}
    cells = {cell: design.config_of(study, *cell) for cell in (base, parallel, other)}
    assert matching.timings(study, cells, known) == {base: 1.0, parallel: 0.75, other: 1.5}


def test_cells_that_differ_in_the_number_of_updates_alone_are_timed_once(config, monkeypatch):
    timed = fake_times(monkeypatch, {"base": 0.5, "parallel": 0.75})
    study = replace(design.read(config), budgets=(2.0, 4.0))
    names = [(rung, arm) for rung in ("tiny-x2", "tiny-x4") for arm in study.arms]
    seconds = matching.timings(study, {Cell(*name): design.config_of(study, *name) for name in names}, {})
    assert seconds == {Cell(rung, arm): {"base": 0.5, "parallel": 0.75}[arm] for rung, arm in names}
    assert timed == ["base", "parallel", "base"]  # the baseline, and then both in turns
