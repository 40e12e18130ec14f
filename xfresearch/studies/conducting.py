"""Runs a study, one run after another, and goes on where it stopped. Several processes may share the runs.

The directory of a study has study.json (the design), seconds.json (the times of updates), a directory for each run,
runs.json (the results of all runs that have ended), and at the end results.json, report.html and report.md. Processes on
different machines may work in one directory: each takes a run that nobody trains. The first two and runs.json are enough to
go on elsewhere, without training a finished run again.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from etils import epath

from xfresearch.config.comparing import fingerprint
from xfresearch.run.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, found_in, inside, read_object, write_json, write_rows
from xfresearch.runtime.progress import stage
from xfresearch.runtime.schema import ANY, Maybe, check
from xfresearch.studies import outcome, report
from xfresearch.studies.cells import (
    Cell,
    Job,
    Trial,
    cells,
    compared,
    extensions,
    planned,
    startable,
    startable_for,
    tuning,
)
from xfresearch.studies.design import Study, described
from xfresearch.studies.frequencies import of_frequencies
from xfresearch.studies.matching import Matched
from xfresearch.studies.running import RUNS_FILE, Store, deciding, read_runs, run_trial, seconds, tidy
from xfresearch.training.claims import Busy

WAIT = 5.0  # seconds between two looks at runs that other processes train
DESIGN, RESULTS, SECONDS = "study.json", "results.json", "seconds.json"
TIMES = {"updates": {ANY: {"seconds": float}}, "machine": Maybe(str)}  # seconds.json
# What was decided before the first run.
FIXED: tuple[str, ...] = ("question", "rule", "base", "options", "baseline", "match", "solve")
FIXED += ("multiple", "rates", "extensions", "tune_at", "seeds", "trend", "metric", "margin")
GROWING = ("sizes", "arms", "cells", "solve_in")  # their entries may not change either, but others may be added


def starts(study: Study, store: Store, found: Mapping[Trial, dict]) -> bool:
    """Whether the study has not begun in its directory, and needs runs that other studies do not have."""
    return not exists(store.folder / DESIGN) and bool(left(study, found))


def require_same_design(study: Study, workdir) -> None:
    """Raises UserError if the directory has runs of another design: a rule that was changed after the runs decides nothing,
    and the runs of an arm that was changed would be lost."""
    folder = epath.Path(workdir)
    if not (exists(folder / DESIGN) and exists(folder / RUNS_FILE)):
        return
    before, now = _kept_design(folder), json.loads(json.dumps(described(study)))
    pairs = [(name, before.get(name), now[name]) for name in FIXED]
    pairs += [(f"{kind}.{name}", value, now[kind].get(name)) for kind in GROWING for name, value in before[kind].items()]
    pairs += [(name, None, other) for name, other in _changes_of_known(before, now)]
    for name, value, other in pairs:
        if value != other:
            raise UserError(
                f"config.{name}={other!r} is not allowed with --workdir={workdir}, which began with {value!r}: use a new "
                "directory, with --reuse of this one for runs that are the same"
            )


def _kept_design(folder) -> dict:
    """The design that a directory began with."""
    found = read_object(inside(folder, DESIGN))
    missing = [name for name in FIXED if name not in found]
    missing += [name for name in GROWING if not isinstance(found.get(name), dict)]
    if missing:
        raise UserError(
            f"{folder / DESIGN} is damaged or of another version (it has no {', '.join(missing)}): restore it, or use a new "
            "directory, with --reuse of this one for runs that are the same"
        )
    return found


def _changes_of_known(before: Mapping, now: Mapping) -> Iterator[tuple[str, object]]:
    """(key, value) of options that were added to arms and sizes that the design had before."""
    known = {f"{size}/{arm}" for size in before["sizes"] for arm in before["arms"]}
    for kind, names in (("cells", known), ("solve_in", before["arms"].keys())):
        yield from ((f"{kind}.{name}", now[kind][name]) for name in sorted(now[kind].keys() & names - before[kind].keys()))


def read_seconds(study: Study, workdir, configs: Mapping[Cell, Config]) -> dict[Cell, float]:
    """The seconds of an update of each cell that was timed with the config that it has now. An arm was timed in turns with
    the baseline, so its time counts only beside the baseline's of that moment."""
    updates = _times(workdir)["updates"]
    known = {cell: updates.get("/".join(cell), {}) for cell in configs}
    found = {cell: each["seconds"] for cell, each in known.items() if each.get("config") == _timed(configs[cell])}
    return {cell: value for cell, value in found.items() if Cell(cell.size, study.baseline) in found}


def keep_seconds(study: Study, found: Mapping[Cell, float], configs: Mapping[Cell, Config], workdir) -> None:
    """Writes the seconds of an update of each cell, and the machine on which the first ones were timed."""
    from xfresearch.runtime.hardware import describe_machine

    known = read_seconds(study, workdir, configs)
    machine = (known and _times(workdir).get("machine")) or outcome.machine(describe_machine())
    updates = {"/".join(cell): {"seconds": value, "config": _timed(configs[cell])} for cell, value in found.items()}
    write_json(epath.Path(workdir) / SECONDS, {"machine": machine, "updates": updates})


def _timed(config: Config) -> str:
    """A digest of the options that decide how long an update takes."""
    without, also = ("seed", "steps", "optimizer.learning_rate"), ("model.", "training.", "mesh.")
    return fingerprint(config, without=without, also=also)


def _times(workdir) -> dict:
    file = inside(workdir, SECONDS)
    found = read_object(file) if exists(file) else {"updates": {}}
    try:
        return check(found, TIMES, file)
    except UserError as error:
        raise UserError(f"{error}: remove the file, and --plan times them again") from None


def results(study: Study, store: Store, solved: Mapping[Cell, Matched]) -> dict[Trial, dict]:
    """The results of all finished runs that the study needs, cell by cell."""
    found: dict[Trial, dict] = {}
    for cell in cells(study):
        looked_for = set()
        while new := [trial for trial in _known(study, _values(study, found), cell) if trial not in looked_for]:
            looked_for.update(new)
            kept = {trial: store.find(study, trial, solved[trial.cell].config) for trial in new}
            found |= {trial: result for trial, result in kept.items() if result is not None}
    return found


def _known(study: Study, values: Mapping[Trial, float], cell: Cell) -> list[Trial]:
    """All runs of a cell that are known to be needed."""
    return tuning(study, values, cell) + compared(study, values, cell)


def conduct(study: Study, store: Store, solved: Mapping[Cell, Matched], job: Job | None = None) -> dict[Trial, dict]:
    """Runs what the study, or a job of it, still needs, with one progress bar. Other processes may do so at the same time:
    a run that one of them trains is left to it. Returns the results of all finished runs."""

    def wanted(found: Mapping[Trial, dict]) -> list[Trial]:
        values = _values(study, found)
        if job is not None:
            return startable_for(study, values, job)
        return list(dict.fromkeys(trial for cell in cells(study) for trial in startable(study, values, cell)))

    found = results(study, store, solved)
    outcome.require_same_data(found)
    _tidy_all(study, store, found)
    total = _steps(solved, planned(study), job) + _steps(solved, extensions(study, found), job)
    with stage("study", total, "updates") as progress:
        progress.update(_steps(solved, found, job))
        while trials := wanted(found):
            done = _run_one(study, store, solved, trials, progress.update)
            if done is None:  # other processes train all of them
                time.sleep(WAIT)
            before, found = found, _keep_runs(study, store, solved)
            new = found.keys() - before.keys()
            progress.extend(_steps(solved, extensions(study, new), job))
            progress.update(_steps(solved, new - {done}, job))
    return _keep_runs(study, store, solved)


def _steps(solved: Mapping[Cell, Matched], trials: Iterable[Trial], job: Job | None) -> int:
    """The updates of runs, those of a job's cell if there is one."""
    cells_of = {job.cell} if job else solved.keys()
    return sum(solved[trial.cell].config.steps for trial in trials if trial.cell in cells_of)


def _run_one(study: Study, store: Store, solved, trials: Sequence[Trial], count: Callable[[int], None]) -> Trial | None:
    """Runs the first of `trials` that no other process trains, and returns it; None if others train all."""
    for trial in trials:
        try:
            result = run_trial(study, store, trial, solved[trial.cell], count)
        except Busy:
            continue
        print(f"{trial.folder}: {_in_words(study, result)}", file=sys.stderr, flush=True)
        return trial
    return None


def _tidy_all(study: Study, store: Store, found: Iterable[Trial]) -> None:
    """Removes checkpoints that processes left which were killed after their result was written."""
    with_checkpoints = {each.parent for each in found_in(store.folder, "*/*/*/checkpoints")}
    for folder in (store.folder / trial.folder for trial in found):
        if folder in with_checkpoints:
            tidy(study, folder)


def _keep_runs(study: Study, store: Store, solved: Mapping[Cell, Matched]) -> dict[Trial, dict]:
    """Writes runs.json, with what other processes have run meanwhile, and returns the results. Runs that it had stay: it may
    be their only copy, which a design that changes back needs. Two processes may write at once; the last one sees that the
    file lacks runs of the other one, and writes it again."""
    while True:
        found = results(study, store, solved)
        outcome.require_same_data(found)
        kept, new = read_runs(store.folder), {result["fingerprint"]: result for result in found.values()}
        if all(json.dumps(result) == json.dumps(kept.get(name)) for name, result in new.items()):
            return found
        write_rows(store.folder / RUNS_FILE, kept | new, "runs")


def left(study: Study, found: Mapping[Trial, dict]) -> list[Cell]:
    """The cells that still need runs."""
    return [cell for cell in cells(study) if startable(study, _values(study, found), cell)]


def _in_words(study: Study, result: Mapping) -> str:
    if "diverged" in result:
        return "diverged"
    value = result["evaluation"][study.metric]
    words = "not finite" if value is None else f"{value:.4f}"
    return f"{study.metric.replace('_', ' ')} {words}, {seconds(result):.0f} s"


def _values(study: Study, found: Mapping[Trial, dict]) -> dict[Trial, float]:
    return {trial: deciding(study, result) for trial, result in found.items()}


def write_report(study: Study, store: Store, solved: Mapping[Cell, Matched], found: Mapping[Trial, dict]) -> dict:
    """Writes results.json and the report that is made of it. Returns the results. Raises UserError if a run is missing."""
    from xfresearch.runtime.hardware import git_commit

    baselines = {size: solved[Cell(size, study.baseline)].config for size in study.sizes}
    unigram = {size: deciding(study, {"evaluation": of_frequencies(config)}) for size, config in baselines.items()}
    folder = store.folder
    seconds_of_updates = read_seconds(study, folder, {cell: each.config for cell, each in solved.items()})
    outcome_found = outcome.outcome_of(study, solved, found, unigram, seconds_of_updates)
    outcome_found["made"]["report"] = [f"{outcome.short_commit(git_commit())}, {time.strftime('%Y-%m-%d')}"]
    outcome_found["made"]["timed_on"] = _times(folder).get("machine", "") if seconds_of_updates else ""
    write_json(folder / RESULTS, outcome_found)
    results = read_object(inside(folder, RESULTS))  # the report is made of what is stored
    report.write(folder, results)
    return results
