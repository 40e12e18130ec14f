"""A study in a tracker: each run that has ended and the verdicts are an entry, once (test_ladder.py sends a whole one)."""

import errno
import json
from contextlib import ExitStack
from importlib.util import find_spec

import numpy as np
import pytest
from etils import epath

from tests.studies.tiny import entries, run
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import finite
from xfresearch.studies import design, study_plan, tracking, trials
from xfresearch.studies.allocation import TUNING_SEED, Trial
from xfresearch.training import trackers
from xfresearch.training.workdir import locked


@pytest.fixture(scope="module")
def made_up(config):
    """A study, the configs of its cells, and three results: of a rate, of a seed, of a run that diverged."""
    study = design.read(config)
    solved = study_plan.make(study).matched
    first, second = list(solved)[:2]
    made = Trial(first, 0.01, TUNING_SEED), Trial(first, 0.003, 0), Trial(second, 0.03, 1)
    each = {"evaluation": {"bits_per_byte": np.float64(1.5), "loss": np.float32(2.0)}, "step": 12}
    probes = {"copying": np.float32(0.25), "sink": float("nan")}
    results = [each, each | {"probes": probes}, {"evaluation": {}, "diverged": "the loss is not finite"}]
    named = zip(made, "abc", results, strict=True)
    return study, solved, {trial: {"fingerprint": name, **result} for trial, name, result in named}


def test_an_entry_has_the_cell_the_measures_and_why_a_run_diverged(made_up, tmp_path):
    study, solved, results = made_up
    tracking.Record(study, epath.Path(tmp_path), "jsonl").runs(solved, results)
    chooses, decides, diverged = entries(tmp_path)
    assert (chooses["use"], chooses["learning_rate"], chooses["name"]) == ("chooses the rate", 0.01, [*results][0].folder)
    assert (decides["rung"], decides["arm"], decides["seed"]) == ("tiny", "base", 0)
    assert decides["evaluation/loss"] == 2.0 and decides["probes/copying"] == 0.25 and "probes/sink" not in decides
    assert diverged["diverged"] == "the loss is not finite" and not any("/" in name for name in diverged)
    stored = json.loads(json.dumps(finite(list(results.values())), default=float))  # as a process that resumes reads them
    tracking.Record(study, epath.Path(tmp_path), "jsonl").runs(solved, dict(zip(results, stored, strict=True)))
    assert len(entries(tmp_path)) == 3


def test_an_error_of_the_tracker_is_a_warning_and_the_next_call_sends_the_rest(made_up, tmp_path, monkeypatch, capsys):
    study, solved, results = made_up
    finish, calls = tracking.Lines.finish, []

    def full(lines, finished):
        calls.append(finished)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(lines, finished)

    monkeypatch.setattr(tracking.Lines, "finish", full)
    record = tracking.Record(study, epath.Path(tmp_path), "jsonl")
    record.runs(solved, results)
    record.runs(solved, results)
    assert len(calls) == 2 and len(entries(tmp_path)) == 1
    expected = "warning: --tracker=jsonl: No space left on device; the same command again sends what is missing\n"
    assert capsys.readouterr().err == expected
    tracking.Record(study, epath.Path(tmp_path), "jsonl").runs(solved, results)
    assert [entry["fingerprint"] for entry in entries(tmp_path)] == ["a", "b", "c"]


def test_a_process_waits_while_another_one_sends(made_up, tmp_path, monkeypatch):
    study, solved, results = made_up
    other, waits = ExitStack(), []
    other.enter_context(locked(tmp_path / "tracker"))

    def wait(seconds):
        waits.append(seconds)
        other.close()

    monkeypatch.setattr(tracking.time, "sleep", wait)
    tracking.Record(study, epath.Path(tmp_path), "jsonl").runs(solved, results)
    assert waits == [tracking.WAIT] and len(entries(tmp_path)) == 3


def test_tensorboard_has_a_directory_for_each_run(made_up, tmp_path):
    study, solved, results = made_up
    tracking.Record(study, epath.Path(tmp_path), "tensorboard").runs(solved, results)
    found = {str(file.parent.relative_to(tmp_path / "tracker" / "tensorboard")) for file in tmp_path.rglob("*tfevents*")}
    assert found == {trial.folder for trial in results}


def test_a_tracker_that_is_not_there_is_one_line_before_anything_runs(config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    monkeypatch.setattr(trials, "run_trial", None)
    with pytest.raises(UserError, match="--tracker='wandb' is not allowed: .* pip install wandb"):
        run(config, tmp_path, "--tracker", "wandb")
    with pytest.raises(UserError, match="--tracker: .*'paper'"):
        run(config, tmp_path, "--tracker", "paper")


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_has_a_run_for_each_entry(made_up, tmp_path, monkeypatch):
    import wandb

    study, solved, results = made_up
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        tracking.Record(study, epath.Path(tmp_path), "wandb").runs(solved, results)
    wandb.teardown()  # its process has written all files
    files = list((tmp_path / "tracker" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == len(results)
    for trial in results:
        assert any(trial.folder.encode() in file.read_bytes() for file in files)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_has_a_run_for_each_entry(made_up, tmp_path, monkeypatch):
    import mlflow

    study, solved, results = made_up
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):
        tracking.Record(study, epath.Path(tmp_path), "mlflow").runs(solved, results)
    client = mlflow.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == trackers.PROJECT]
    found = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {trial.folder for trial in results}
    decides = found[[*results][1].folder]
    assert decides.data.tags["study"] == tmp_path.name and decides.data.metrics["probes/copying"] == 0.25
    assert (decides.data.params["arm"], decides.data.params["seed"]) == ("base", "0")
