"""Runs the cells of a study in one process, and goes on where it stopped.

The directory of a study has study.json (the design), seconds.json (the times of updates), a directory for each run,
runs.json (the results of all runs that have ended), and at the end results.json, report.html and report.md. Processes on
different machines may run different cells in one directory. The first two and runs.json are enough to go on elsewhere,
without training a finished run again.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from etils import epath

from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, found_in, inside, read_object, write_json, write_rows
from xfresearch.runtime.progress import Stage, stage
from xfresearch.runtime.schema import ANY, Maybe, check
from xfresearch.studies import exports, interim, ledger, outcome, report
from xfresearch.studies.cells import Cell, Ladder, Trial
from xfresearch.studies.design import Study, described, rungs
from xfresearch.studies.frequencies import check_coverage, of_frequencies
from xfresearch.studies.grouping import Choice, run_trials
from xfresearch.studies.matching import Matched
from xfresearch.studies.running import RUNS_FILE, Store, deciding, read_runs, run_trial, seconds, tidy
from xfresearch.studies.tracking import Record
from xfresearch.training.claims import Busy
from xfresearch.training.timing import same_seconds

WAIT = 2.0  # seconds, if all runs that are ready are in other processes
DESIGN, RESULTS, SECONDS = "study.json", "results.json", "seconds.json"
TIMES = {"updates": {ANY: {"seconds": float}}, "machine": Maybe(str)}  # seconds.json
# What may not change in a directory with runs: they would be those of another experiment. What may change makes a new
# version (ledger.py).
FIXED = ("base", "options", "match", "solve", "multiple", "rates", "extensions", "tune_at", "rate_runs")
GROWING = ("sizes", "arms", "cells", "solve_in")  # their entries may not change either, but may be added and removed


def starts(ladder: Ladder, store: Store, ended: Mapping[Trial, dict]) -> bool:
    """Whether the study has not begun in its directory, and needs runs that other studies do not have."""
    return not exists(store.folder / DESIGN) and bool(left(ladder, ended))


def require_same_design(study: Study, workdir) -> None:
    """Raises UserError if the directory has runs of another experiment: those of an arm that was changed would be lost."""
    folder = epath.Path(workdir)
    if not (exists(folder / DESIGN) and exists(folder / RUNS_FILE)):
        return
    before, now = _kept_design(folder), json.loads(json.dumps(described(study)))
    pairs = [(name, before.get(name), now[name]) for name in FIXED]
    for kind in GROWING:
        pairs += [(f"{kind}.{name}", before[kind][name], now[kind][name]) for name in before[kind] if name in now[kind]]
    pairs += [(name, None, other) for name, other in _changes_of_known(before, now)]
    for name, value, other in pairs:
        if value != other:
            raise UserError(
                f"config.{name}={other!r} is not allowed with --workdir={workdir}, which began with {value!r}: use a new "
                "directory, with --reuse of this one for runs that are the same"
            )


def added_sizes(workdir) -> list[str]:
    """The sizes of the design that a directory has."""
    return list(_kept_design(epath.Path(workdir))["sizes"]) if exists(epath.Path(workdir) / DESIGN) else []


def _kept_design(folder) -> dict:
    """The design that a directory began with."""
    kept = read_object(inside(folder, DESIGN))
    missing = [name for name in FIXED if name not in kept]
    missing += [name for name in GROWING if not isinstance(kept.get(name), dict)]
    if missing:
        raise UserError(
            f"{folder / DESIGN} is damaged or of another version (it has no {', '.join(missing)}): restore it, or use a new "
            "directory, with --reuse of this one for runs that are the same"
        )
    return kept


def _changes_of_known(before: Mapping, now: Mapping) -> Iterator[tuple[str, object]]:
    """(key, value) of the options that the new design adds to arms and sizes of the old one."""
    arms = before["arms"].keys() & now["arms"]
    known = {f"{size}/{arm}" for size in before["sizes"] for arm in arms}
    for kind, names in (("cells", known), ("solve_in", arms)):
        yield from ((f"{kind}.{name}", now[kind][name]) for name in sorted(now[kind].keys() & names - before[kind].keys()))


def read_seconds(study: Study, workdir, configs: Mapping[Cell, Config]) -> dict[Cell, float]:
    """The seconds of an update of each cell that was timed with the config that it has now. An arm was timed in turns with
    the baseline, so its time counts only beside the baseline's of that moment."""
    updates = _times(workdir)["updates"]
    known = {cell: updates.get("/".join(cell), {}) for cell in configs}
    now = {cell: same_seconds(config) for cell, config in configs.items()}
    known_seconds = {cell: each["seconds"] for cell, each in known.items() if each.get("config") == now[cell]}
    return {cell: value for cell, value in known_seconds.items() if Cell(cell.rung, study.baseline) in known_seconds}


def keep_seconds(study: Study, timed: Mapping[Cell, float], configs: Mapping[Cell, Config], workdir) -> None:
    """Writes the seconds of an update of each cell, and the machine on which the first ones were timed."""
    from xfresearch.runtime.hardware import describe_machine

    known = read_seconds(study, workdir, configs)
    machine = (known and _times(workdir).get("machine")) or outcome.machine(describe_machine())
    updates = {"/".join(cell): {"seconds": value, "config": same_seconds(configs[cell])} for cell, value in timed.items()}
    write_json(epath.Path(workdir) / SECONDS, {"machine": machine, "updates": updates})


def _times(workdir) -> dict:
    file = inside(workdir, SECONDS)
    times = read_object(file) if exists(file) else {"updates": {}}
    try:
        return check(times, TIMES, file)
    except UserError as error:
        raise UserError(f"{error}: remove the file, and --time times them again") from None


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


def conduct(
    ladder: Ladder,
    store: Store,
    solved: Mapping[Cell, Matched],
    job: int | None = None,
    record: Record | None = None,
    together: Choice | None = None,
) -> dict[Trial, dict]:
    """Makes all runs that are left, with one progress bar; of several processes, each takes the next run that is ready and
    that no other one has, or those of its cell (together). With the number of a job, makes one run. Waits if all that are
    ready are in other processes, because others may follow from them. record: tells a tracker of every run that has ended.
    Returns the results of all finished runs."""
    study, ended = ladder.study, results(ladder, store, solved)
    if lost := check_coverage(study, next(iter(solved.values())).config):
        print(f"held-out text: {lost}", file=sys.stderr)
    outcome.require_same_data(ended)
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
    study: Study, store: Store, solved, ready: Sequence[Trial], count, together: Choice | None
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
        outcome.require_same_data(ended)
        kept, new = read_runs(store.folder), {result["fingerprint"]: result for result in {**known, **ended}.values()}
        if all(json.dumps(result) == json.dumps(kept.get(name)) for name, result in new.items()):
            return ended
        write_rows(store.folder / RUNS_FILE, kept | new, "runs")


def left(ladder: Ladder, ended: Mapping[Trial, dict]) -> list[Trial]:
    """The runs that are expected beside those that have ended."""
    values = _values(ladder.study, ended)
    return ladder.expected(values, interim.pairs_of_arms(ladder, values))


def ready_now(ladder: Ladder, ended: Mapping[Trial, dict]) -> list[Trial]:
    """The runs that can start now."""
    values = _values(ladder.study, ended)
    return ladder.ready(values, interim.pairs_of_arms(ladder, values))


def _in_words(study: Study, result: Mapping) -> str:
    if "diverged" in result:
        return "diverged"
    value = result["evaluation"][study.metric]
    words = "not finite" if value is None else f"{value:.4f}"
    return f"{study.metric.replace('_', ' ')} {words}, {seconds(result):.0f} s"


def _values(study: Study, ended: Mapping[Trial, dict]) -> dict[Trial, float]:
    return {trial: deciding(study, result) for trial, result in ended.items()}


def write_report(ladder: Ladder, store: Store, solved: Mapping[Cell, Matched], ended: Mapping[Trial, dict]) -> dict:
    """Writes results.json and the report that is made of it. Returns the results. Raises UserError if a run is missing."""
    from xfresearch.runtime.hardware import git_commit

    study, folder = ladder.study, store.folder
    baselines = {rung.name: solved[Cell(rung.name, study.baseline)].config for rung in rungs(study)}
    frequencies = {_held_out_data(config): config for config in baselines.values()}  # rungs may share their data
    known = {data: deciding(study, {"evaluation": of_frequencies(config)}) for data, config in frequencies.items()}
    unigram = {rung: known[_held_out_data(config)] for rung, config in baselines.items()}
    seconds_of_updates = read_seconds(study, folder, {cell: each.config for cell, each in solved.items()})
    concluded = outcome.outcome_of(ladder, solved, ended, unigram, seconds_of_updates)
    concluded["made"]["report"] = [f"{outcome.short_commit(git_commit())}, {time.strftime('%Y-%m-%d')}"]
    concluded["made"]["timed_on"] = _times(folder).get("machine", "") if seconds_of_updates else ""
    concluded["versions"] = ledger.conclude(folder, report.verdicts(concluded))
    write_json(folder / RESULTS, concluded)
    results = read_object(inside(folder, RESULTS))  # the report is made of what is stored
    exports.write_runs(folder, results, ended)
    write_figures(folder, results)
    return results


def write_figures(folder, results: Mapping) -> None:
    """Writes what is made of results.json alone: the report, and the differences for other programs."""
    report.write(folder, results)
    exports.write_differences(folder, results, report.picture(results))


def _held_out_data(config: Config) -> str:
    """A key of the options that decide the frequencies of tokens and the text on which they are measured."""
    return repr((config.data, config.evaluation, config.sequence_length, config.seed, config.model.vocab_size))
