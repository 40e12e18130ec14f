"""Trackers get every number of metrics.jsonl. Those whose library is not installed here are skipped: `make trackers`."""

import errno
import json
from importlib.util import find_spec

import numpy as np
import pytest
from etils import epath

from tests.tiny_runs import tiny_config
from xfresearch.runtime.errors import UserError
from xfresearch.training import trackers
from xfresearch.training.callbacks import Start, scalars
from xfresearch.training.metrics import plain

ROW = {"loss": 4.0, "norms": {"mlp": [0.5, np.float32(2.0)]}, "note": "text", "bad": float("nan")}


def tracked(name: str, workdir, start: int, steps: range, reason: str = "") -> None:
    """A run of `steps` with the tracker `name`, which resumed from the step `start`."""
    config = tiny_config(log__tracker=name)
    (tracker,) = trackers.chosen(config)
    tracker.on_start(Start(config, epath.Path(workdir), start, 1.0))
    for step in steps:
        tracker.on_row(step, "train", plain({**ROW, "loss": 8 / step}))
    tracker.on_row(step, "evaluation", {"loss": 9 / step})
    tracker.on_end(step, reason)


def test_a_row_is_flattened_without_texts_and_numbers_that_are_not_finite():
    result = dict(scalars("train", plain(ROW)))
    assert result == {"train/loss": 4.0, "train/norms/mlp/0": 0.5, "train/norms/mlp/1": 2.0}


def test_event_files_have_every_number_and_purge_lost_steps(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    tracked("tensorboard", tmp_path, 0, range(1, 9))
    first = set((tmp_path / "tensorboard").iterdir())
    tracked("tensorboard", tmp_path, 6, range(7, 8))
    resumed = read_events(Event, next(iter(set((tmp_path / "tensorboard").iterdir()) - first)))
    starts = [event.step for event in resumed if event.session_log.status == 1]
    assert starts == [7]
    numbers = {(v.tag, e.step): v.simple_value for f in first for e in read_events(Event, f) for v in e.summary.value}
    assert numbers["train/norms/mlp/1", 5] == 2 and numbers["evaluation/loss", 8] == 9 / 8
    assert len(numbers) == 8 * 3 + 1


def read_events(event_type, path):
    """TFRecord: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    data, events = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        events.append(event_type.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return events


@pytest.mark.parametrize("method", ["begin", "write", "finish"])
def test_an_error_of_the_disk_ends_the_tracking_with_a_warning(tmp_path, monkeypatch, capsys, method):
    def full(tracker, *arguments):
        if method != "begin":
            tracker._events.close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trackers.TensorBoard, method, full)
    monkeypatch.setattr(trackers.TensorBoard, "errors", OSError)
    tracked("tensorboard", tmp_path, 0, range(1, 4))
    assert capsys.readouterr().err == "warning: tensorboard cannot be written: No space left on device\n"


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(UserError, match=f"config.log.tracker='{name}' is not allowed: .* pip install {name}"):
            trackers.chosen(tiny_config(log__tracker=name))
    assert trackers.chosen(tiny_config(log__tracker="jsonl")) == []


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_every_number_and_a_run_that_resumes_keeps_its_id(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for start, steps in ((0, range(1, 6)), (3, range(4, 7))):
        tracked("wandb", tmp_path, start, steps)
    wandb.teardown()  # its process has written all files
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    first, second = (wandb_rows(file.read_bytes()) for file in files)
    ids = {file.stem.removeprefix("run-") for file in files}  # a folder of the same second has one more number
    assert len(ids) == 1 and json.loads((tmp_path / "tracker.json").read_text())["id"] in ids
    assert [row["step"] for row in first] == [1, 2, 3, 4, 5, 5] and [row["step"] for row in second] == [4, 5, 6, 6]
    assert first[1]["train/loss"] == 4.0 and first[-1]["evaluation/loss"] == 9 / 5


def wandb_rows(content: bytes) -> list[dict]:
    """The rows of a file of W&B: seven bytes, then LevelDB's log of records, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, record, at = [], b"", 7
    while at + 7 <= len(content):
        if (left := -at % 2**15) < 7 and left:  # a block ends with zeros if no header fits
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            items = Record.FromString(record).history.item
            rows += [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}]
            record = b""
    return [row for row in rows if row]


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_in_a_directory_has_every_number_and_a_run_that_resumes_goes_on(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "variants")
    tracked("mlflow", tmp_path, 0, range(1, 6), reason="SIGTERM")
    client = mlflow.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "variants"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED" and run.data.params["model.width"] == "32"
    tracked("mlflow", tmp_path, 3, range(4, 7))
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    losses = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert losses == {step: 8 / step for step in range(1, 7)}
