"""The trials of a study: its directory, its results so far, and the runs that are made until none is left.

The directory of a study has study.json (the design), seconds.json (the times of updates), a directory for each run,
runs.json (the results of all runs that have ended), and at the end results.json, report.html and report.md. Processes on
different machines may run different cells in one directory. The first two and runs.json are enough to go on elsewhere,
without training a finished run again.

Runs of a cell may train in one program (training/together.py): a GPU that a small model leaves idle has room. Whether they
do is no part of the design, because it decides how a study is computed, and not what it asks. But roundings differ from
those of a run alone, so a result names the runs with which it was made.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import NamedTuple

from etils import epath

from xfresearch.checkpoints.store import steps as saved_steps
from xfresearch.options.comparing import fingerprint
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import Diverged, UserError
from xfresearch.runtime.files import exists, found_in, inside, remove_directory, write_rows
from xfresearch.runtime.progress import Stage, stage
from xfresearch.studies import measurement
from xfresearch.studies.allocation import Cell, Ladder, Trial
from xfresearch.studies.design import Study
from xfresearch.studies.matching import Matched
from xfresearch.studies.measurement import RESULT_FILE, RUNS_FILE, deciding, read_result, read_runs
from xfresearch.studies.tracking import Record
from xfresearch.studies.verdicts import pairs_of_arms
from xfresearch.training.claims import Busy
from xfresearch.training.timing import seconds_per_update
from xfresearch.training.trackers import first_line
from xfresearch.training.workdir import locked

WAIT = 2.0  # seconds, if all runs that are ready are in other processes


def wanted_of(study: Study, trial: Trial, config: Config) -> measurement.Wanted:
    """The measures of a run of a cell with this config; the probes of the study only if the run is compared."""
    return measurement.Wanted(config, study.metric, () if trial.tunes else study.probes, study.task_data)


class Store(NamedTuple):
    """The results of a study: its directory, and results that are known from runs.json files by their fingerprint."""

    folder: epath.Path
    known: Mapping[str, Sequence[dict]]

    def find(self, study: Study, trial: Trial, config: Config) -> dict | None:
        """The result of a run of the cell with this config; None if it has not finished, had another config, measured less,
        or on other text."""
        own, file = _fingerprint(trial, config), inside(self.folder, trial.folder, RESULT_FILE)
        results = (*([read_result(file)] if exists(file) else []), *self.known.get(own, ()))
        return next((found for found in results if wanted_of(study, trial, config).is_in(found, own)), None)


@cache
def _fingerprint(trial: Trial, config: Config) -> str:
    """Of a run of the cell with this config."""
    return fingerprint(measurement.config_of_trial(trial, config))


def open_store(workdir, others: Sequence[str] = ()) -> Store:
    """The results in a study's directory, and in those of other studies. Raises UserError for another one without any."""
    folder = epath.Path(workdir)
    known: dict[str, list[dict]] = {}
    for path in others:
        if not exists(epath.Path(path) / RUNS_FILE):
            raise UserError(f"--reuse={path} is not allowed: it must be the directory of a study, which has {RUNS_FILE}")
    for path in (folder, *map(epath.Path, others)):
        for wanted, result in read_runs(path).items():
            known.setdefault(wanted, []).append(result)
    return Store(folder, known)


def results(
    ladder: Ladder, store: Store, solved: Mapping[Cell, Matched], known: Mapping[Trial, dict] | None = None
) -> dict[Trial, dict]:
    """The results of all finished runs that the study needs, in the order in which they can run. known: results that need
    not be read again. They do not decide which runs are needed: of several processes, one may have made a run that another
    does not miss, and all must conclude the same."""
    ended: dict[Trial, dict] = {}
    known, unfinished = known or {}, set()
    while new := [trial for trial in ready_now(ladder, ended) if trial not in unfinished]:
        for trial in new:
            result = known.get(trial) or store.find(ladder.study, trial, solved[trial.cell].config)
            if result is None:
                unfinished.add(trial)
            else:
                ended[trial] = result
    return ended


def left(ladder: Ladder, ended: Mapping[Trial, dict]) -> list[Trial]:
    """The runs that are expected beside those that have ended."""
    values = _values(ladder.study, ended)
    return ladder.expected(values, pairs_of_arms(ladder, values))


def ready_now(ladder: Ladder, ended: Mapping[Trial, dict]) -> list[Trial]:
    """The runs that can start now."""
    values = _values(ladder.study, ended)
    return ladder.ready(values, pairs_of_arms(ladder, values))


def _values(study: Study, ended: Mapping[Trial, dict]) -> dict[Trial, float]:
    return {trial: deciding(study, result) for trial, result in ended.items()}


class OneProgram:
    """Whether the runs of a cell train in one program: --together. Raises UserError if they always shall, and cannot."""

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


def conduct(
    ladder: Ladder,
    store: Store,
    solved: Mapping[Cell, Matched],
    job: int | None = None,
    record: Record | None = None,
    together: OneProgram | None = None,
) -> dict[Trial, dict]:
    """Makes all runs that are left, with one progress bar; of several processes, each takes the next run that is ready and
    that no other one has, or those of its cell (together). With the number of a job, makes one run. Waits if all that are
    ready are in other processes, because others may follow from them. record: tells a tracker of every run that has ended.
    Returns the results of all finished runs."""
    study, ended = ladder.study, results(ladder, store, solved)
    if lost := measurement.check_coverage(study, next(iter(solved.values())).config):
        print(f"held-out text: {lost}", file=sys.stderr)
    measurement.require_same_data(ended)
    with_checkpoints = {each.parent for each in found_in(store.folder, "*/*/*/checkpoints")}
    for folder in (store.folder / trial.folder for trial in ended):
        if folder in with_checkpoints:
            tidy(study, folder)

    def steps(trials: Iterable[Trial]) -> int:
        return sum(solved[trial.cell].config.steps for trial in trials)

    def show(progress: Stage) -> None:
        """Shows the runs that have ended and the runs that are left, also those of other processes."""
        progress.update(steps(ended) - progress.done)
        progress.extend(steps(ended) + steps(left(ladder, ended)) - (progress.total or 0))

    def keep(known: Mapping[Trial, dict]) -> dict[Trial, dict]:
        ended = _keep_runs(ladder, store, solved, known)
        if record:
            record.runs(solved, ended)
        return ended

    with stage("study", steps(ended) + steps(left(ladder, ended)), "updates") as progress:
        while ready := ready_now(ladder, ended):
            show(progress)
            first = (job or 0) % len(ready)  # jobs that start at once begin at different runs
            made = _make_some(study, store, solved, [*ready[first:], *ready[:first]], progress.update, together)
            if not made:
                time.sleep(WAIT)
                ended = results(ladder, store, solved, ended)
                continue
            ended = keep(ended | made)
            if job is not None:
                break
        show(progress)
    return keep(ended)


def _make_some(
    study: Study, store: Store, solved, ready: Sequence[Trial], count, together: OneProgram | None
) -> dict[Trial, dict]:
    """The result of the first of the runs that no other process has, or those of the runs of its cell; {} if others have
    them all."""
    groups: dict[object, list[Trial]] = {}
    for trial in ready:
        groups.setdefault(trial.cell if together and not together.refusal else trial, []).append(trial)
    for trials in groups.values():
        matched = solved[trials[0].cell]
        try:
            if together and trials[1:]:
                made = run_trials(study, store, trials, matched, count, together)
            else:
                made = {trials[0]: run_trial(study, store, trials[0], matched, count)}
        except Busy:
            continue
        for trial, result in made.items():
            print(f"{trial.folder}: {_in_words(study, result)}", file=sys.stderr, flush=True)
        return made
    return {}


def _keep_runs(
    ladder: Ladder, store: Store, solved: Mapping[Cell, Matched], known: Mapping[Trial, dict]
) -> dict[Trial, dict]:
    """Writes runs.json, with what other processes have run meanwhile, and returns the results. Runs that it had stay: it may
    be their only copy, which a design that changes back needs. Two processes may write at once; the last one sees that the
    file lacks runs of the other one, and writes it again."""
    while True:
        ended = results(ladder, store, solved, known)
        measurement.require_same_data(ended)
        kept, new = read_runs(store.folder), {result["fingerprint"]: result for result in {**known, **ended}.values()}
        if all(json.dumps(result) == json.dumps(kept.get(name)) for name, result in new.items()):
            return ended
        write_rows(store.folder / RUNS_FILE, kept | new, "runs")


def _in_words(study: Study, result: Mapping) -> str:
    if "diverged" in result:
        return "diverged"
    value = result["evaluation"][study.metric]
    words = "not finite" if value is None else f"{value:.4f}"
    return f"{study.metric.replace('_', ' ')} {words}, {measurement.seconds(result):.0f} s"


def run_trial(study: Study, store: Store, trial: Trial, matched: Matched, count: Callable[[int], None]) -> dict:
    """Trains one run, unless it has a result, and returns the result. If it is told to stop, it saves, and the process
    ends as that of a training run does. Raises UserError as `train_and_measure` does."""
    config = measurement.config_of_trial(trial, matched.config)
    folder = inside(store.folder, trial.folder)
    with locked(folder):
        if result := store.find(study, trial, matched.config):
            return result
        count(config.steps if measurement.result_of_kept(folder, config.steps) else 0)
        wanted, watching = wanted_of(study, trial, matched.config), [measurement.Counted(count)]
        result, stopped_by = measurement.train_and_measure(folder, config, wanted, watching)
        if result:
            tidy(study, folder)
        end_if_stopped(stopped_by, folder)
    return result


def run_trials(
    study: Study, store: Store, trials: Sequence[Trial], matched: Matched, count: Callable, together: OneProgram
) -> dict[Trial, dict]:
    """Trains those of the runs of a cell that no other process has together, or the first one of them alone, and returns
    their results; {} if others have to be chosen. A result that another process has written meanwhile is returned at once.
    Raises Busy if others have them all, and UserError as run_trial does."""
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
    return {free[0]: run_trial(study, store, free[0], matched, count)}


def _level(store: Store, trials: Sequence[Trial], steps: int) -> list[Trial]:
    """The runs that have come as far as the first one that must be trained."""
    saved = {}
    for trial in trials:
        folder = inside(store.folder, trial.folder)
        if not measurement.result_of_kept(folder, steps):
            saved[trial] = saved_steps(folder)[-1:]
    return [trial for trial, at in saved.items() if at == next(iter(saved.values()))]


def _train_together(
    study: Study, store: Store, trials: Sequence[Trial], matched: Matched, count: Callable
) -> dict[Trial, dict]:
    """The results of runs that train together, without those that are stopped before their end."""
    from xfresearch.training import loop, together

    configs = [measurement.config_of_trial(trial, matched.config) for trial in trials]
    folders = [inside(store.folder, trial.folder) for trial in trials]
    shared = []
    for trial, folder, config in zip(trials, folders, configs, strict=True):
        measurement.require_same_config(folder, config)
        shared.append(measurement.shared_with(folder, [other.folder for other in trials if other != trial]))
    loop.setup_jax(configs[0])
    clock, counted = together.SharedClock(len(trials)), measurement.Counted(lambda updates: count(len(trials) * updates))
    tokenizer = measurement.tokenizer_of(configs[0])
    try:
        with measurement.same_manifest():
            trained = together.train(configs, folders, tokenizer, clock, lambda step: counted.on_step(step, {}))
    except NotImplementedError as error:  # of a library's operation
        arm = trials[0].cell.arm
        raise UserError(f"--together=always is not allowed: {arm} cannot train so ({first_line(error)})") from error
    results = {}
    for trial, folder, config, others, each in zip(trials, folders, configs, shared, trained, strict=False):
        wanted = wanted_of(study, trial, matched.config)
        if result := measurement.measured(folder, config, wanted, each, clock, others):
            results[trial] = result
            tidy(study, folder)
    stopped_by = next((each.stopped_by for each in trained if not isinstance(each, Diverged)), "")
    end_if_stopped(stopped_by, inside(store.folder, *trials[0].cell))
    return results


def end_if_stopped(stopped_by: str, folder) -> None:
    """Ends the process with the code of the signal that stopped the runs in a directory, if there was one."""
    if stopped_by:
        print(f"{stopped_by}: saved {folder}; the same command goes on there", file=sys.stderr)
        sys.exit(128 + signal.Signals[stopped_by])


def tidy(study: Study, folder) -> None:
    """Removes the checkpoints of a run that has a result; the process may have ended before it could."""
    if not study.keep and (folder / RESULT_FILE).exists() and (folder / "checkpoints").exists():
        remove_directory(folder, "checkpoints")
