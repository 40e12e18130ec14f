"""Trackers: callbacks that send the rows of metrics.jsonl to a library's log, by `log.tracker`. A study opens a log for
each of its runs (studies/tracking.py).

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from etils import epath

from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, in_bucket, inside, read_object, write_json
from xfresearch.runtime.schema import check
from xfresearch.training.callbacks import Callback, Figures, Start, scalars
from xfresearch.training.metrics import in_words

PROJECT = "xfresearch"  # of W&B, and the experiment of MLflow, unless their variables name another
FILE = "tracker.json"  # in a run's directory: the id of the run in the tracker, which a run that resumes continues
MOST_PARAMS = 100  # that MLflow takes at once
SECONDS_BETWEEN_FLUSHES = 30  # of TensorBoard's events


class Log(NamedTuple):
    """A log that a tracker opens."""

    folder: epath.Path  # of the library's files
    name: str
    options: Mapping[str, Any]  # nested: the config of the run
    step: int = 0  # the update that the log goes on from; 0 for a new log
    id: str = ""  # of the log in the tracker; '' for a new log
    study: str = ""  # the study that the run belongs to; '' for none


class Tracker(Callback):
    """A callback that writes rows to the log of a library, which may raise any error."""

    name = ""
    errors: type[Exception] = Exception

    def __init__(self) -> None:
        self._open = False

    @abstractmethod
    def begin(self, log: Log) -> str:
        """Opens the log, and returns its id in the tracker; '' without ids."""

    @abstractmethod
    def write(self, step: int, figures: dict[str, float]) -> None:
        """Writes the numbers of one row."""

    @abstractmethod
    def finish(self, finished: bool) -> None:
        """Closes the log."""

    def on_start(self, start: Start) -> None:
        try:
            made = self.begin(_log_of(start)._replace(id=_known_id(start, self.name)))
            write_json(start.workdir / FILE, {"tracker": self.name, "id": made})
        except self.errors as error:
            raise UserError(f"config.log.tracker={self.name!r}: {first_line(error)}") from error
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
    """Event files in the directory tensorboard, where each run of a study has one with its name.

    It writes in the calling thread. tensorboardX's SummaryWriter has a thread that ends at the first error of the disk;
    the run would then wait forever for that thread to take the next event.
    """

    name = "tensorboard"

    def begin(self, log: Log) -> str:
        """TensorBoard hides the events of an earlier process after the log's step."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import directory_check

        self.errors = Exception if in_bucket(log.folder) else OSError  # gcsfs has errors of its own
        directory = str(inside(log.folder, "tensorboard", *((log.name,) if log.study else ())))
        directory_check(directory)
        self._events = EventsWriter(f"{directory}/events", f".{log.step}")
        self._events.write_event(Event(step=log.step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._flushed = time.monotonic()
        return ""

    def on_start(self, start: Start) -> None:
        self._open = True
        with self._or_warning():  # a full disk does not stop a run
            self.begin(_log_of(start))

    def write(self, step: int, figures: dict[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for tag, value in figures.items():
            self._events.write_event(Event(step=step, wall_time=time.time(), summary=scalar(tag, value)))
        if time.monotonic() - self._flushed >= SECONDS_BETWEEN_FLUSHES:
            self._flushed = time.monotonic()
            self._events.flush()

    def finish(self, finished: bool) -> None:
        self._events.close()


class WandB(Tracker):
    """A run of Weights & Biases. Updates are numbered by a metric `step`: W&B's own steps cannot go back, and a run that
    resumes writes the rows after its checkpoint again."""

    name = "wandb"

    def begin(self, log: Log) -> str:
        import wandb

        run_id = log.id or secrets.token_hex(8)
        folder = {} if in_bucket(log.folder) else {"dir": str(log.folder)}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=log.name,
            group=log.study or None,
            id=run_id,
            resume="allow",
            config=dict(log.options),
            settings=wandb.Settings(console="off"),  # our filter of control characters has the streams
            **folder,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run_id

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def finish(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """A run of MLflow. Its thread sends the rows."""

    name = "mlflow"

    def begin(self, log: Log) -> str:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        self._sent: Any = None  # the last rows that were given to MLflow's thread
        if log.id:
            self._client.update_run(log.id, status="RUNNING")
        self._run: str = log.id or self._new(log)
        params = [Param(key, str(value)) for key, value in _dotted(log.options)]
        for first in range(0, 0 if log.id else len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])
        return self._run

    def _new(self, log: Log) -> str:
        tags = {"study": log.study} if log.study else {}
        return str(self._client.create_run(self._experiment(), run_name=log.name, tags=tags).info.run_id)

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
    return [tracker_of(name, "config.log.tracker")] if name in TRACKERS else []


def tracker_of(name: str, option: str) -> Tracker:
    """A tracker that `option` names. Raises UserError if its library is not installed."""
    if name != "tensorboard" and find_spec(name) is None:
        raise UserError(f"{option}={name!r} is not allowed: it must be one whose library is installed: pip install {name}")
    return TRACKERS[name]()


def first_line(error: Exception) -> str:
    """What went wrong, in one line: the errors of libraries may have many."""
    return (in_words(error).strip().splitlines() or [type(error).__name__])[0]


def _log_of(start: Start) -> Log:
    return Log(start.workdir, start.workdir.name, dataclasses.asdict(start.config), start.step)


def _dotted(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every option."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _known_id(start: Start, name: str) -> str:
    """The id that the run has in the tracker `name`; '' for a run that begins."""
    file = inside(start.workdir, FILE)
    if not start.step or not exists(file):
        return ""
    kept = check(read_object(file), {"tracker": str, "id": str}, file)
    return kept["id"] if kept["tracker"] == name else ""
