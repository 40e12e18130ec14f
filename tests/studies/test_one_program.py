"""Runs of a cell that train together, in one program, are runs that train alone, and a study shares them like other runs."""

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace

import jax
import pytest

from tests.studies.test_merging import pretend
from tests.studies.tiny import run, time_nothing
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object
from xfresearch.studies import design, measurement, study_plan, trials
from xfresearch.studies.allocation import TUNING_SEED, Cell, Trial
from xfresearch.studies.trials import open_store
from xfresearch.training.claims import Busy
from xfresearch.training.metrics import read_metrics
from xfresearch.training.workdir import locked

CELL = Cell("tiny", "base")
FIRST, SECOND = Trial(CELL, 1e-2, 0), Trial(CELL, 3e-2, 1)
WILD = Trial(CELL, 1e30, 2)  # diverges
SAME = 1e-6  # of losses
TOGETHER = "runs of a cell train in one program"


@pytest.fixture(scope="module")
def planned(config):
    """(study, matched config of the cell). Every update has a row."""
    chosen = design.read([*config, "--config.probes=('copying',)"])
    chosen = replace(chosen, options=(*chosen.options, "log.every=1", "evaluation.every=4"))
    return chosen, study_plan.make(chosen).matched[CELL]


def train(planned, folder, every, count=lambda updates: None, together=True) -> dict:
    chosen, matched = planned
    return trials.run_trials(chosen, open_store(folder), every, matched, count, lambda *_: together)


@pytest.fixture(scope="module")
def alone(planned, tmp_path_factory):
    """(directory, results) of runs that train one by one."""
    folder, results = tmp_path_factory.mktemp("alone"), {}
    for trial in (FIRST, SECOND, WILD):
        results |= train(planned, folder, [trial], together=False)
    return folder, results


@pytest.fixture(scope="module")
def together(planned, tmp_path_factory):
    folder, began, counted = tmp_path_factory.mktemp("together"), time.perf_counter(), []
    results = train(planned, folder, [FIRST, SECOND], counted.append)
    return folder, results, time.perf_counter() - began, counted


def losses(folder, trial, kind: str) -> dict[int, float]:
    rows = read_metrics(folder / trial.folder / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if row["kind"] == kind}


def test_runs_together_are_runs_alone(planned, alone, together):
    assert list(together[1]) == [FIRST, SECOND]
    for trial, result in together[1].items():
        for kind, number in (("train", 12), ("evaluation", 3)):  # batches of another seed have other losses
            expected = losses(alone[0], trial, kind)
            assert len(expected) == number and losses(together[0], trial, kind) == pytest.approx(expected, rel=SAME)
        other = alone[1][trial]
        assert result["evaluation"] == pytest.approx(other["evaluation"], rel=SAME)
        assert result["blocks"]["values"] == pytest.approx(other["blocks"]["values"], abs=1.1e-3)  # of rounded numbers
        assert [at for at, _ in result["curve"]] == [4, 8, 12] and result["probes"].keys() == {"copying"}
        measured = ("evaluation", "blocks", "curve", "probes", "seconds", "made")
        rest = [{name: value for name, value in each.items() if name not in measured} for each in (result, other)]
        assert rest[0] == rest[1] and result["seconds"]["tokens"] == other["seconds"]["tokens"]
        stored = measurement.read_result(together[0] / trial.folder / "result.json")
        assert stored == result | {"curve": [list(point) for point in result["curve"]]}
    first, second = (losses(alone[0], trial, "train") for trial in (FIRST, SECOND))
    assert all(abs(first[step] - second[step]) > 1e3 * SAME for step in first)


def test_a_result_names_the_runs_with_which_it_was_made(alone, together):
    made = {trial: result["made"].get("together") for trial, result in (alone[1] | together[1]).items()}
    assert made == {FIRST: [SECOND.folder], SECOND: [FIRST.folder], WILD: None}
    assert all("together" not in result["made"] for result in alone[1].values())


def test_runs_share_their_time_and_the_progress_counts_all(together):
    shared = [measurement.seconds(result) for result in together[1].values()]
    assert 0.5 * together[2] < sum(shared) <= together[2] and max(shared) < 0.7 * sum(shared)
    assert sum(together[3]) == 2 * 12


def test_a_run_that_diverges_leaves_the_others(planned, alone, together, tmp_path):
    results = train(planned, tmp_path, [WILD, SECOND])
    assert results[WILD]["diverged"] == alone[1][WILD]["diverged"] and "not finite" in results[WILD]["diverged"]
    assert results[WILD]["evaluation"] == {}
    assert results[SECOND]["evaluation"] == pytest.approx(alone[1][SECOND]["evaluation"], rel=SAME)


def test_runs_that_are_stopped_go_on_bit_for_bit(planned, together, tmp_path, monkeypatch, capsys):
    done = []

    def stop(updates):
        done.append(updates)
        if sum(done) == 2 * 8:  # an evaluation is due, which the process that goes on makes
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end:
        train(planned, tmp_path, [FIRST, SECOND], stop)
    assert end.value.code == 128 + signal.SIGTERM and "the same command goes on there" in capsys.readouterr().err
    assert not list(tmp_path.rglob("result.json"))
    assert {each.name for each in tmp_path.rglob("checkpoints/*")} == {"8"}
    store, steps = open_store(tmp_path), planned[1].config.steps
    assert trials._level(store, [FIRST, SECOND], steps) == [FIRST, SECOND]
    checkpoints = tmp_path / SECOND.folder / "checkpoints"
    checkpoints.rename(checkpoints.with_name("elsewhere"))  # a process that was killed had saved the first run alone
    assert trials._level(store, [FIRST, SECOND], steps) == [FIRST]
    checkpoints.with_name("elsewhere").rename(checkpoints)
    results = train(planned, tmp_path, [FIRST, SECOND])
    for trial, expected in together[1].items():
        for name in ("evaluation", "curve", "blocks", "probes"):
            assert results[trial][name] == expected[name]
        assert losses(tmp_path, trial, "train") == losses(together[0], trial, "train")
        assert results[trial]["seconds"]["tokens"] == expected["seconds"]["tokens"]


def test_a_run_remembers_with_which_runs_it_was_trained_since_it_began(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(measurement, "saved_steps", lambda folder: saved)
    assert measurement.shared_with(tmp_path) == [] and not list(tmp_path.iterdir())
    assert measurement.shared_with(tmp_path, ["b", "a"]) == ["a", "b"]
    saved.append(5)
    assert measurement.shared_with(tmp_path) == ["a", "b"] and measurement.shared_with(tmp_path, ["c"]) == ["a", "b", "c"]
    saved.clear()
    assert measurement.shared_with(tmp_path) == []  # it begins again
    saved.append(5)
    assert measurement.shared_with(tmp_path) == []


def test_a_group_holds_the_locks_of_all_its_runs(planned, tmp_path, monkeypatch):
    every, taken = [FIRST, SECOND, WILD], []

    def recorded(study, store, group, matched, count):
        for trial in group:
            with pytest.raises(Busy), locked(tmp_path / trial.folder):
                pass
        taken.append(list(group))
        return {}

    monkeypatch.setattr(trials, "_train_together", recorded)
    with locked(tmp_path / SECOND.folder):  # another process
        train(planned, tmp_path, every)
    train(planned, tmp_path, every)
    assert taken == [[FIRST, WILD], every]
    with ExitStack() as others, pytest.raises(Busy, match="other processes have all runs of tiny/base"):
        for trial in every:
            others.enter_context(locked(tmp_path / trial.folder))
        train(planned, tmp_path, every)


def test_a_study_makes_the_runs_of_a_cell_together(config, tmp_path, monkeypatch, capsys):
    groups = []

    def pretended(study, store, trials, matched, count):
        groups.append([(trial.cell, trial.seed) for trial in trials])
        results = {trial: pretend(study, store, trial, matched, count) for trial in trials}
        return {trial: result | {"made": result["made"] | {"together": ["other"]}} for trial, result in results.items()}

    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "_train_together", pretended)
    run([*config, "--config.probes=()"], tmp_path, "--together=always")
    arms = [Cell("tiny", arm) for arm in ("base", "parallel")]
    assert groups == [[(cell, TUNING_SEED)] * 2 for cell in arms] + [[(cell, seed) for seed in (0, 1)] for cell in arms]
    assert f"together   {TOGETHER}\n" in capsys.readouterr().out
    assert len(read_object(tmp_path / "runs.json")["runs"]) == 8
    assert len(read_object(tmp_path / "ledger.json")["versions"]) == 1
    run([*config, "--config.probes=()"], tmp_path, "--together=never")  # is no new version of the design
    assert len(read_object(tmp_path / "ledger.json")["versions"]) == 1


@pytest.mark.parametrize(
    "way, job, devices, backend, words",
    [
        ("auto", None, 1, "cpu", "no: on a CPU that is not faster"),
        ("auto", None, 1, "gpu", f"{TOGETHER} if that is faster here, which is timed when a cell begins"),
        ("auto", None, 8, "gpu", "no: every run is spread over 8 devices"),
        ("auto", "3", 1, "gpu", "no: a job makes one run"),
        ("never", None, 1, "gpu", "no: --together=never"),
        ("always", None, 1, "cpu", TOGETHER),
        ("always", None, 8, "cpu", None),
        ("always", "3", 1, "gpu", None),
    ],
)
def test_the_plan_says_whether_runs_train_together(monkeypatch, way, job, devices, backend, words):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(trials, "_is_faster", lambda *_: True)
    if words is None:
        with pytest.raises(UserError, match="--together=always is not allowed: (every run|a job)"):
            trials.OneProgram(way, job)
    else:
        choice = trials.OneProgram(way, job)
        assert str(choice) == words and choice(CELL, None, 2) == words.startswith(TOGETHER)
        assert not choice(CELL, None, 1)


@pytest.mark.parametrize(
    "of_three, faster, words",
    [
        (0.004, True, "tiny/base: 3 runs train together: 4.0 ms an update together, 6.0 ms one by one\n"),
        (0.007, False, "tiny/base: 3 runs train one by one: 7.0 ms an update together, 6.0 ms one by one\n"),
        (None, False, "tiny/base: 3 runs train one by one, because they cannot together (MemoryError: too large)\n"),
    ],
)
def test_an_accelerator_takes_what_is_faster(monkeypatch, capsys, of_three, faster, words):
    def timed(config, runs=1):
        if runs == 3 and of_three is None:
            raise MemoryError("too large")
        return of_three if runs == 3 else 0.002

    monkeypatch.setattr(trials, "seconds_per_update", timed)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    choice = trials.OneProgram("auto", None)
    assert [choice(CELL, None, runs) for runs in (3, 3, 2)] == [faster] * 3
    assert capsys.readouterr().err == words  # timed once
    choice(CELL, None, 4)  # of which the memory may be too small
    choice(CELL._replace(arm="other"), None, 2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" train")[0] for line in lines] == ["tiny/base: 4 runs", "tiny/other: 2 runs"]
