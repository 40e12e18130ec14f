"""Trackers: callbacks that send the rows of metrics.jsonl to a library's log, by `log.tracker`.

Each library is imported only if it is chosen. Its own environment variables say where it logs: WANDB_PROJECT, WANDB_MODE
('offline' needs no account), MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME. An error while the run trains ends the tracking
with a warning, and not the run.
"""

import dataclasses
import os
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from xfresearch.config.comparing import flat
from xfresearch.run.config import Config
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.files import exists, in_bucket, inside, read_object, write_json
from xfresearch.runtime.schema import check
from xfresearch.training.callbacks import Callback, Figures, Start, scalars
from xfresearch.training.metrics import in_words
from xfresearch.training.tensorboard import Events

PROJECT = "xfresearch"  # of W&B, and the experiment of MLflow, unless their variables name another
FILE = "tracker.json"  # in a run's directory: the id of the run in the tracker, which a run that resumes continues
MOST_PARAMS = 100  # that MLflow takes at once


class Tracker(Callback):
    """A tracker whose library may raise anything."""

    name = ""
    errors: type[Exception] = Exception

    def __init__(self) -> None:
        self._open = False

    @abstractmethod
    def begin(self, start: Start) -> None:
        """Opens the log."""

    @abstractmethod
    def write(self, step: int, figures: dict[str, float]) -> None:
        """Writes the numbers of one row."""

    @abstractmethod
    def finish(self, finished: bool) -> None:
        """Closes the log."""

    def on_start(self, start: Start) -> None:
        try:
            self.begin(start)
        except self.errors as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"config.log.tracker={self.name!r}: {first}") from error
        self._open = True

    def on_row(self, step: int, kind: str, figures: Figures) -> None:
        if self._open:
            with self._or_warning():
                self.write(step, dict(scalars(kind, figures)))

    def on_end(self, step: int, reason: str) -> None:
        if self._open:
            with self._or_warning():
                self.finish(not reason)

    @contextmanager
    def _or_warning(self) -> Iterator[None]:
        """An error ends the tracking, with a warning."""
        try:
            yield
        except self.errors as error:
            print(f"warning: {self.name} cannot be written: {in_words(error)}", file=sys.stderr)
            self._open = False


class TensorBoard(Tracker):
    """Event files in `workdir`/tensorboard."""

    name = "tensorboard"

    def begin(self, start: Start) -> None:
        self.errors = Exception if in_bucket(start.workdir) else OSError  # gcsfs has errors of its own
        self._events = Events(str(inside(start.workdir, "tensorboard")), start.step)

    def on_start(self, start: Start) -> None:
        self._open = True
        with self._or_warning():  # a full disk does not stop a run
            self.begin(start)

    def write(self, step: int, figures: dict[str, float]) -> None:
        for tag, value in figures.items():
            self._events.add(step, tag, value)

    def finish(self, finished: bool) -> None:
        self._events.close()


class WandB(Tracker):
    """A run of Weights & Biases. Steps are the values of `step`: W&B refuses to go back to one, and a run that resumes
    writes those after its checkpoint again."""

    name = "wandb"

    def begin(self, start: Start) -> None:
        import wandb

        run_id = _known_id(start, self.name) or secrets.token_hex(8)
        folder = {} if in_bucket(start.workdir) else {"dir": str(start.workdir)}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=start.workdir.name,
            id=run_id,
            resume="allow",
            config=dataclasses.asdict(start.config),
            settings=wandb.Settings(console="off"),  # our filter of control characters has the streams
            **folder,
        )
        _keep_id(start, self.name, run_id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def finish(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """A run of MLflow. Its thread sends the rows."""

    name = "mlflow"

    def begin(self, start: Start) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        self._sent: Any = None  # the last rows that were given to MLflow's thread
        known = _known_id(start, self.name)
        if known:
            self._client.update_run(known, status="RUNNING")
        self._run = known or self._client.create_run(self._experiment(), run_name=start.workdir.name).info.run_id
        _keep_id(start, self.name, self._run)
        params = [Param(key, str(value)) for key, value in flat(start.config).items()]
        for first in range(0, 0 if known else len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def write(self, step: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in figures.items()]
        self._sent = self._client.log_batch(self._run, metrics=metrics, synchronous=False)

    def finish(self, finished: bool) -> None:
        if self._sent:
            self._sent.wait()  # MLflow sends in order
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def chosen(config: Config) -> list[Tracker]:
    """The tracker of log.tracker; none for 'jsonl'. Raises UserError if its library is not installed."""
    name = config.log.tracker
    if name not in TRACKERS:
        return []
    installed = name == "tensorboard" or find_spec(name) is not None
    require(installed, "log.tracker", name, f"one whose library is installed: pip install {name}")
    return [TRACKERS[name]()]


def _known_id(start: Start, name: str) -> str:
    """The id that the run has in the tracker `name`; '' for a run that begins."""
    file = inside(start.workdir, FILE)
    if not start.step or not exists(file):
        return ""
    kept = check(read_object(file), {"tracker": str, "id": str}, file)
    return kept["id"] if kept["tracker"] == name else ""


def _keep_id(start: Start, name: str, run_id: str) -> None:
    write_json(start.workdir / FILE, {"tracker": name, "id": run_id})
