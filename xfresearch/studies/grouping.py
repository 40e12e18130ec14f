"""Runs of a cell that train together, in one program (training/together.py): a GPU that a small model leaves idle has room.

Whether they do is no part of the design, because it decides how a study is computed, and not what it asks. But roundings
differ from those of a run alone, so a result names the runs with which it was made.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from xfresearch.checkpoints.store import steps as saved_steps
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import Diverged, UserError
from xfresearch.runtime.files import inside
from xfresearch.studies import running
from xfresearch.studies.cells import Cell, Trial
from xfresearch.studies.design import Study
from xfresearch.studies.frequencies import tokenizer_of
from xfresearch.studies.matching import Matched
from xfresearch.training.claims import Busy
from xfresearch.training.timing import seconds_per_update
from xfresearch.training.trackers import first_line


class Choice:
    """Whether the runs of a cell train together: --together. Raises UserError if they always shall, and cannot."""

    def __init__(self, way: str, job: str | None):
        self.way, self.refusal = way, _refusal(way, job)
        self._timed: dict[Cell, tuple[int, bool]] = {}  # the most runs that were timed, and whether that was faster
        if way == "always" and self.refusal:
            raise UserError(f"--together=always is not allowed: {self.refusal}")

    def __str__(self) -> str:
        if self.refusal:
            return f"no: {self.refusal}"
        faster = "" if self.way == "always" else " if that is faster here, which is timed when a cell begins"
        return f"runs of a cell train in one program{faster}"

    def __call__(self, cell: Cell, config: Config, runs: int) -> bool:
        """Whether `runs` runs of a cell train together. Times an update, unless it has timed one of as many runs."""
        if self.refusal or self.way == "always" or runs < 2:
            return not self.refusal and runs > 1
        if runs > self._timed.get(cell, (1, False))[0]:
            self._timed[cell] = runs, _is_faster(cell, config, runs)
        return self._timed[cell][1]


def _refusal(way: str, job: str | None) -> str:
    """Why no runs train together here; '' if they may."""
    import jax

    if way == "never" or job is not None:
        return "--together=never" if way == "never" else "a job makes one run"
    if jax.device_count() > 1:
        return f"every run is spread over {jax.device_count()} devices"
    return "on a CPU that is not faster" if way == "auto" and jax.default_backend() == "cpu" else ""


def _is_faster(cell: Cell, config: Config, runs: int) -> bool:
    """Times an update of one run, and of `runs` runs in one program, and says which is faster."""
    alone, name = runs * seconds_per_update(config), "/".join(cell)
    try:
        together = seconds_per_update(config, runs)
    except Exception as error:  # no memory, or a kernel that is not mapped: the update of one run has just shown to work
        reason = f"{type(error).__name__}: {first_line(error)}"
        print(f"{name}: {runs} runs train one by one, because they cannot together ({reason})", file=sys.stderr, flush=True)
        return False
    words = f"{1e3 * together:.1f} ms an update together, {1e3 * alone:.1f} ms one by one"
    chosen = "together" if together < alone else "one by one"
    print(f"{name}: {runs} runs train {chosen}: {words}", file=sys.stderr, flush=True)
    return together < alone


def run_trials(
    study: Study, store: running.Store, trials: Sequence[Trial], matched: Matched, count: Callable, together: Choice
) -> dict[Trial, dict]:
    """Trains those of the runs of a cell that no other process has together, or the first one of them alone, and returns
    their results; {} if others have to be chosen. A result that another process has written meanwhile is returned at once.
    Raises Busy if others have them all, and UserError as running.run_trial does."""
    from xfresearch.training.workdir import locked

    with ExitStack() as locks:
        free = []
        for trial in trials:
            with suppress(Busy):
                locks.enter_context(locked(inside(store.folder, trial.folder)))
                free.append(trial)
        if found := {trial: result for trial in free if (result := store.find(study, trial, matched.config))}:
            return found
        group = _level(store, free, matched.config.steps)
        if group and together(group[0].cell, matched.config, len(group)):
            return _train_together(study, store, group, matched, count)
    if not free:
        raise Busy(f"other processes have all runs of {'/'.join(trials[0].cell)} that are ready")
    return {free[0]: running.run_trial(study, store, free[0], matched, count)}


def _level(store: running.Store, trials: Sequence[Trial], steps: int) -> list[Trial]:
    """The runs that have come as far as the first one that must be trained."""
    saved = {}
    for trial in trials:
        folder = inside(store.folder, trial.folder)
        if not running.result_of_kept(folder, steps):
            saved[trial] = saved_steps(folder)[-1:]
    return [trial for trial, at in saved.items() if at == next(iter(saved.values()))]


def _train_together(
    study: Study, store: running.Store, trials: Sequence[Trial], matched: Matched, count: Callable
) -> dict[Trial, dict]:
    """The results of runs that train together, without those that are stopped before their end."""
    from xfresearch.training import loop, together

    configs = [running.config_of_trial(trial, matched.config) for trial in trials]
    folders = [inside(store.folder, trial.folder) for trial in trials]
    shared = []
    for trial, folder, config in zip(trials, folders, configs, strict=True):
        running.require_same_config(folder, config)
        shared.append(running.shared_with(folder, [other.folder for other in trials if other != trial]))
    loop.setup_jax(configs[0])
    clock, counted = together.SharedClock(len(trials)), running.Counted(lambda updates: count(len(trials) * updates))
    tokenizer = tokenizer_of(configs[0])
    try:
        with running.same_manifest():
            trained = together.train(configs, folders, tokenizer, clock, lambda step: counted.on_step(step, {}))
    except NotImplementedError as error:  # of a library's operation
        arm = trials[0].cell.arm
        raise UserError(f"--together=always is not allowed: {arm} cannot train so ({first_line(error)})") from error
    results = {}
    for trial, folder, config, others, each in zip(trials, folders, configs, shared, trained, strict=False):
        wanted = running.wanted_of(study, trial, matched.config)
        if result := running.measured(folder, config, wanted, each, clock, others):
            results[trial] = result
            running.tidy(study, folder)
    stopped_by = next((each.stopped_by for each in trained if not isinstance(each, Diverged)), "")
    running.end_if_stopped(stopped_by, inside(store.folder, *trials[0].cell))
    return results
