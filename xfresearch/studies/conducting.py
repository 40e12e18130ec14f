"""Runs the cells of a study in one process, one run after another, and goes on where it stopped.

The directory of a study has study.json (the design), a directory for each run, runs.json (the results of all runs that have
ended), and at the end results.json, report.html and report.md. Processes on different machines may run different cells in
one directory. study.json and runs.json are enough to go on elsewhere, without training a finished run again.
"""

import sys
import time
from collections.abc import Iterable, Mapping

from etils import epath

from xfresearch.errors import UserError
from xfresearch.files import exists, read_object, write_json, write_rows
from xfresearch.progress import stage
from xfresearch.studies import outcome, report
from xfresearch.studies.cells import Cell, Trial, cells, next_trial, planned
from xfresearch.studies.design import Study, described
from xfresearch.studies.frequencies import of_frequencies
from xfresearch.studies.matching import Matched
from xfresearch.studies.running import RUNS_FILE, Store, deciding, read_runs, run_trial, seconds

DESIGN, RESULTS, SECONDS = "study.json", "results.json", "seconds.json"
# What was decided before the first run. Arms may be added.
FIXED = ("question", "rule", "baseline", "match", "metric", "margin", "seeds")


def begun(workdir) -> bool:
    """Whether the directory has a study."""
    return exists(epath.Path(workdir) / DESIGN)


def keep_design(study: Study, workdir) -> None:
    """Writes the design. Raises UserError if the directory has another study, or the same with another rule: a rule that
    changes after the runs is none."""
    file = epath.Path(workdir) / DESIGN
    if exists(file):
        before = read_object(file)
        for name in FIXED:
            if before.get(name) != getattr(study, name):
                raise UserError(
                    f"config.{name}={getattr(study, name)!r} is not allowed with --workdir={workdir}, which began with "
                    f"{before.get(name)!r}: use a new directory"
                )
    write_json(file, described(study))


def read_seconds(workdir) -> dict[Cell, float] | None:
    """The seconds of an update of each cell, as they were when the study began; None if it has not begun."""
    file = epath.Path(workdir) / SECONDS
    return {Cell(*key.split("/")): value for key, value in read_object(file).items()} if exists(file) else None


def keep_seconds(found: Mapping[Cell, float], workdir) -> None:
    """Writes the seconds of an update of each cell, if there are any."""
    if found:
        write_json(epath.Path(workdir) / SECONDS, {"/".join(cell): value for cell, value in found.items()})


def results(study: Study, store: Store, solved: Mapping[Cell, Matched]) -> dict[Trial, dict]:
    """The results of all finished runs that the study needs, in the order in which they ran."""
    found: dict[Trial, dict] = {}
    for cell in cells(study):
        while trial := next_trial(study, _values(study, found), cell):
            result = store.find(study, trial, solved[trial.cell].config)
            if result is None:
                break
            found[trial] = result
    return found


def conduct(study: Study, store: Store, solved: Mapping[Cell, Matched], chosen: Iterable[Cell]) -> dict[Trial, dict]:
    """Runs what the chosen cells still need, with one progress bar. Returns the results of all finished runs."""
    chosen = list(chosen)
    found = results(study, store, solved)
    total = sum(solved[trial.cell].config.steps for trial in planned(study) if trial.cell in chosen)
    with stage("study", total, "updates") as progress:
        progress.update(sum(solved[trial.cell].config.steps for trial in found if trial.cell in chosen))
        for cell in chosen:
            while trial := next_trial(study, _values(study, found), cell):
                found[trial] = run_trial(study, store, trial, solved[trial.cell], progress.update)
                print(f"{trial.folder}: {_in_words(study, found[trial])}", file=sys.stderr, flush=True)
                _keep_runs(study, store, solved)
    return _keep_runs(study, store, solved)


def _keep_runs(study: Study, store: Store, solved: Mapping[Cell, Matched]) -> dict[Trial, dict]:
    """Adds to runs.json what this process and others have run meanwhile, and returns the results. Runs that the design no
    longer has stay there."""
    found, file = results(study, store, solved), store.folder / RUNS_FILE
    kept = read_runs(file) if exists(file) else {}
    write_rows(file, kept | {result["fingerprint"]: result for result in found.values()}, "runs")
    return found


def left(study: Study, found: Mapping[Trial, dict]) -> list[Cell]:
    """The cells that still need runs."""
    return [cell for cell in cells(study) if next_trial(study, _values(study, found), cell)]


def _in_words(study: Study, result: Mapping) -> str:
    if "diverged" in result:
        return "diverged"
    return f"{study.metric.replace('_', ' ')} {result['evaluation'][study.metric]:.4f}, {seconds(result):.0f} s"


def _values(study: Study, found: Mapping[Trial, dict]) -> dict[Trial, float]:
    return {trial: deciding(study, result) for trial, result in found.items()}


def write_report(study: Study, store: Store, solved: Mapping[Cell, Matched], found: Mapping[Trial, dict]) -> dict:
    """Writes results.json and the report that is made of it. Returns the results. Raises UserError if a run is missing."""
    from xfresearch.hardware import git_commit, versions

    baseline = solved[cells(study)[0]].config
    outcome_found = outcome.found(study, solved, found, deciding(study, {"evaluation": of_frequencies(baseline)}))
    made = {"report": f"{git_commit()[:7] or 'no commit'}, {time.strftime('%Y-%m-%d')}", "versions": versions()}
    outcome_found["made"] |= made
    folder = store.folder
    write_json(folder / RESULTS, outcome_found)
    results = read_object(folder / RESULTS)  # the report is made of what is stored
    report.write(folder, results)
    return results
