"""What a run tells while it trains: the hooks of a Callback, and how the loop calls them.

    class Patience(Callback):
        def on_evaluation(self, step, figures):
            if step - figures.get("best_step", step) >= 1000:
                raise StopTraining("no better held-out loss for 1,000 updates")

The console and the trackers (trackers.py) are callbacks too. They run in the first process alone, in the thread of the
loop, and see numbers that the loop has fetched anyway: a callback never makes the loop wait for the devices.

StopTraining in a hook ends the run as a signal does: its state is saved, and the same call resumes it. In `on_outline`
and `on_start`, it ends the run after one update. Any other exception does the same, and is then raised with its stack trace.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError

if TYPE_CHECKING:  # a command that only needs Callback must not wait for them
    from etils import epath

    from xfresearch.run_config.config import Config

Figures = Mapping[str, Any]  # numbers, and dicts and lists of them


class StopTraining(Exception):
    """A callback raises it, with the reason, to end the run. The state is saved."""


class Start(NamedTuple):
    """The run that begins or resumes."""

    config: "Config"
    workdir: "epath.Path"
    step: int  # the update that it goes on from; 0 for a new run
    bytes_per_token: float | None  # of the training text; None if the data are not text


class Callback:
    """The hooks of a run. Override those that you need. `step` is the number of the update."""

    def on_outline(self, outline: str) -> None:
        """Some lines about model, data, optimizer and devices, before anything is computed."""

    def on_start(self, start: Start) -> None:
        """Before the first update. An exception here, but StopTraining, ends the run before it begins."""

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """After every update, when the figures are there, which may be after the next one was started: `loss` (nats),
        `tokens`, `learning_rate`, `gradient_norm`, `tokens_per_second`, `seconds` of training so far, and others."""

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """After every evaluation on held-out data: `loss`, `accuracy`, `bits_per_byte` and others, and with `best_loss` and
        `best_step` the best one so far on as much text."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """After a checkpoint was saved to the directory `path`."""

    def on_row(self, step: int, kind: str, figures: Figures) -> None:
        """Each row of metrics.jsonl as it is written: of the `kind` 'train', 'evaluation' or 'panel'. For trackers."""

    def on_end(self, step: int, reason: str) -> None:
        """After the last update and its checkpoint, also of a run that fails. `reason` is '' if all updates are made;
        otherwise it says why not: 'SIGTERM', 'SIGINT', the text of StopTraining, or an error."""


class Callbacks:
    """Calls the hooks of several callbacks, in the first process."""

    def __init__(self, callbacks: Sequence[Callback]):
        for number, callback in enumerate(callbacks):
            if not isinstance(callback, Callback):
                raise UserError(f"callbacks[{number}]={callback!r} is not allowed: it must be an xf.Callback")
        self._given = list(callbacks) if distributed.first() else []
        self._started: list[Callback] = []
        self.reason = ""  # why one of them ends the run
        self._error: Exception | None = None

    def outline(self, text: str) -> None:
        """Raises what a callback raises but StopTraining, as `start` does: nothing is lost yet."""
        for callback in self._given:
            self._tell(callback, "on_outline", text)

    def start(self, start: Start) -> None:
        for callback in self._given:
            self._tell(callback, "on_start", start)
            self._started.append(callback)

    def call(self, hook: str, *arguments: object) -> None:
        """Calls a hook of all callbacks. One that fails is not called again."""
        for callback in list(self._started):
            try:
                self._tell(callback, hook, *arguments)
            except Exception as error:
                self._started.remove(callback)
                self._error = self._error or error
                self._stop(f"{type(callback).__name__}.{hook} failed: {type(error).__name__}")

    def _tell(self, callback: Callback, hook: str, *arguments: object) -> None:
        try:
            getattr(callback, hook)(*arguments)
        except StopTraining as stop:
            self._stop(str(stop) or type(callback).__name__)

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        if distributed.is_active():  # all processes must stop after the same update
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def stops(self) -> bool:
        """Whether the loop must stop. False in several processes, which get a notice instead."""
        return bool(self.reason) and not distributed.is_active()

    def end(self, step: int, reason: str) -> None:
        """Calls on_end of all callbacks that were started."""
        self.call("on_end", step, reason)
        self._started = []

    def raise_error(self) -> None:
        """Raises the first exception of a callback, if there was one."""
        if self._error is not None:
            raise self._error


def scalars(kind: str, figures: object) -> Iterator[tuple[str, float]]:
    """(path, number) of every number of a row, in nested dicts and lists: ('train/loss', 2.5), ('train/norms/mlp/0', 1.0).
    A number that is not finite, which a row has as None, is left out."""
    if isinstance(figures, Mapping | list | tuple):
        for key, item in figures.items() if isinstance(figures, Mapping) else enumerate(figures):
            yield from scalars(f"{kind}/{key}", item)
    elif isinstance(figures, int | float):
        yield kind, figures
