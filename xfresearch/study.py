"""python -m xfresearch.study --config FILE[:arg] --workdir DIR [--plan] [--job I] [--reuse DIR ...]
                          [--tracker NAME] [--together WAY] [--config.key=value ...]
python -m xfresearch.study --arms CHANGE ... --workdir DIR [--base FILE[:arg]] [--corpus NAME|PATH] [--plan]
python -m xfresearch.study --report --workdir DIR
python -m xfresearch.study --runs RUN RUN ... --workdir DIR [flags of xfresearch.compare]

Answers a question by experiment: arms at equal cost, tuned learning rates, paired seeds, and a verdict with intervals.
With --arms it writes the study file of changes of a model, and runs it. With --runs it trains nothing, and writes the report
of xfresearch.compare on existing runs.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xfresearch.options import shipped
from xfresearch.runtime import command, jobs
from xfresearch.runtime.errors import UserError

if TYPE_CHECKING:  # --help must not wait for them
    from etils import epath

    from xfresearch.runtime.run_rows import Rows
    from xfresearch.studies.allocation import Cell, Trial
    from xfresearch.studies.design import Study
    from xfresearch.studies.study_plan import Plan
    from xfresearch.studies.trials import OneProgram, Store

RESULTS = "results.json"  # in the directory of a study
BASE = "quickstart:tiny"  # of --arms
EPILOG = """\
examples:
  python -m xfresearch.study --arms feed_forward.kind=relu2 --corpus notes/ --workdir studies/relu2 --plan
  python -m xfresearch.study --config studies/w_o:tiny --workdir studies/try
  python -m xfresearch.study --config studies/w_o --workdir studies/w_o --plan
  python -m xfresearch.study --config studies/w_o --workdir gs://bucket/w_o --job auto
  python -m xfresearch.study --config studies/w_o --workdir studies/w_o --tracker wandb
  python -m xfresearch.study --runs runs/a runs/b --workdir studies/a_and_b

The same command again goes on where it stopped; when all runs have ended, it writes the report. Started several times, it
shares the runs among the processes. docs/studies.md explains."""


def main(arguments: list[str]) -> None:
    options, overrides = parser().parse_known_args(arguments)
    if not options.workdir:
        raise UserError("--workdir='' is not allowed: it must be the directory of the study")
    options.workdir, *options.reuse = map(os.path.expanduser, (options.workdir, *options.reuse))
    if options.runs:
        return _compare(options, overrides)
    if options.report:
        return _report_again(options, overrides)
    if options.arms:
        return _of_arms(options, overrides)
    if options.base or options.corpus:
        raise UserError(f"--{'base' if options.base else 'corpus'} is allowed only with --arms (see --help)")
    if not options.config:
        raise UserError("--config FILE, --arms CHANGE ... or --runs RUN RUN ... is required (see --help)")
    _conduct(options, overrides)


def _conduct(options: Namespace, overrides: list[str]) -> None:
    """Plans the study of --config, makes its runs, and writes its report."""
    shipped.require(options.config)
    from xfresearch.runtime.files import check_output, write_json
    from xfresearch.studies import allocation, design, preregistration, report, tracking, trials

    study = design.read(["--config", options.config, *overrides])
    study = design.with_sizes(study, [*preregistration.added_sizes(options.workdir), *options.add_rung])
    if options.job == jobs.COUNT:
        return print(len(allocation.jobs(study)))
    check_output("--workdir", f"{options.workdir}/{preregistration.DESIGN}")
    preregistration.require_same_design(study, options.workdir)
    store = trials.open_store(options.workdir, options.reuse)
    record = tracking.Record(study, store.folder, options.tracker) if options.tracker else None
    job = None if options.job is None else jobs.chosen(allocation.jobs(study), options.job)
    together = trials.OneProgram(options.together or "auto", options.job)
    planned = _plan(study, store, options, together)
    if options.plan or options.time:
        return
    ended = trials.results(planned.ladder, store, planned.matched)
    preregistration.begin(study, store.folder, ended.values(), options.reuse)
    write_json(store.folder / preregistration.DESIGN, design.described(study))
    ended = trials.conduct(planned.ladder, store, planned.matched, job, record, together)
    if left := len(trials.left(planned.ladder, ended)):
        print(f"no report yet: {left} of {left + len(ended)} runs have not ended")
        return
    outcome = _conclude(planned, store.folder, ended)
    if record:
        record.verdicts(outcome)
    print("\n".join(["", *report.verdicts(outcome), "", f"report     {options.workdir}/report.html"]))


def _of_arms(options: Namespace, overrides: list[str]) -> None:
    """Writes the study file of --arms, and runs it; with --plan, prints it and its plan, and writes no file."""
    if options.config:
        raise UserError("--config is not allowed with --arms, which makes a study file: --base is the config of the model")
    from xfresearch.studies import changes

    text = changes.file_of(options.arms, options.base or BASE, options.corpus)
    with tempfile.TemporaryDirectory() as elsewhere:
        options.config = changes.write(elsewhere if options.plan else options.workdir, text)
        print(f"{text if options.plan else f'file       {options.config}'}\n", flush=True)
        _conduct(options, overrides)


class Studied:
    """A study that has ended. Printed, it is its verdicts."""

    def __init__(self, workdir: str):
        from xfresearch.runtime.files import inside, read_object

        self.workdir = Path(workdir)
        self.figures: dict[str, Any] = read_object(inside(workdir, RESULTS))

    def __repr__(self) -> str:
        from xfresearch.studies import report

        return "\n".join([*report.verdicts(self.figures), f"report     {self.report}"])

    @property
    def report(self) -> Path:
        return self.workdir / "report.html"

    @property
    def table(self) -> "Rows":
        """A row for each arm at each rung: its figures in results.json, and its difference from the baseline."""
        from xfresearch.runtime.run_rows import Rows

        sizes = self.figures["sizes"].items()
        return Rows({"rung": rung, "arm": name, **arm} for rung, here in sizes for name, arm in here["arms"].items())


def study(
    arms: Sequence[str] | Mapping[str, Mapping[str, object]] = (),
    *,
    workdir: str,
    base: str = "",
    corpus: str = "",
    config: str = "",
    overrides: Mapping[str, object] = MappingProxyType({}),
) -> Studied:
    """Makes all runs of a study that are left, as the command does, and returns what was found.

    arms: changes of the config `base`, as {name: {key: value}} or in words ('feed_forward.kind=relu2'), trained on `corpus`;
    or config: the name of a study, or its file. overrides: {key: value} of the study, such as {'seeds': 3}. Prints the plan
    and its time before it begins. Raises UserError for a mistake.
    """
    from xfresearch.run_config.config_files import as_arguments
    from xfresearch.runtime.terminal import filtered
    from xfresearch.studies import changes

    given = {"config": config, "base": base, "corpus": corpus, "workdir": workdir}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    flags += [str(each) for each in as_arguments("", overrides)[2:]]
    with filtered():
        main([*flags, *(["--arms", *words] if (words := changes.as_changes(arms)) else [])])
    return Studied(workdir)


def _plan(study: "Study", store: "Store", options: Namespace, together: "OneProgram") -> "Plan":
    """Prints the plan, checks what can be checked before a run, and returns it."""
    from xfresearch.runtime.files import exists
    from xfresearch.studies import matching, preregistration, study_plan, trials

    planned = study_plan.make(study, _seconds_to_match(study, options) if study.match == "seconds" else {})
    configs = {cell: each.config for cell, each in planned.matched.items()}
    ended = trials.results(planned.ladder, store, planned.matched)
    left = trials.left(planned.ladder, ended)
    print("\n".join([*study_plan.lines(study, planned, ended), f"together   {together}"]), flush=True)
    if options.plan or left:
        study_plan.check_figures(study, configs)
    begins = left and options.job is None and not options.plan and not exists(store.folder / preregistration.DESIGN)
    timed = matching.time_updates if options.time or begins else matching.read_seconds
    seconds = timed(study, options.workdir, configs)
    if untimed := configs.keys() - seconds.keys():
        arms = ", ".join(arm for arm in study.arms if any(cell.arm == arm for cell in untimed))
        print(f"note       there are no seconds of {arms}: updates were not timed; --time times them", flush=True)
    else:
        print(study_plan.time_line(planned, seconds, left), flush=True)
    return planned


def _seconds_to_match(study: "Study", options: Namespace) -> "dict[Cell, float]":
    """The seconds of an update of each cell, which a job does not measure: all jobs need the same ones."""
    from xfresearch.studies import matching
    from xfresearch.studies.allocation import cells
    from xfresearch.studies.design import config_of

    configs = {cell: config_of(study, *cell) for cell in cells(study)}
    if options.job is not None and matching.read_seconds(study, options.workdir, configs).keys() < configs.keys():
        raise UserError(
            f"--job={options.job} is not allowed with config.match='seconds' before updates were timed: run the command "
            f"once with --time, which keeps the times in {options.workdir}"
        )
    return matching.time_updates(study, options.workdir, configs)


def _conclude(planned: "Plan", folder: "epath.Path", ended: "dict[Trial, dict[str, Any]]") -> dict[str, Any]:
    """Writes results.json and the report that is made of it, when all runs have ended. Returns the results."""
    from xfresearch.runtime.files import inside, read_object, write_json
    from xfresearch.studies import estimates, preregistration, report, report_tables

    outcome = estimates.outcome_of_directory(planned.ladder, planned.matched, ended, folder)
    outcome["versions"] = preregistration.conclude(folder, report.verdicts(outcome))
    write_json(folder / RESULTS, outcome)
    outcome = read_object(inside(folder, RESULTS))  # the report is made of what is stored
    report_tables.write_runs(folder, outcome, ended)
    report.write(folder, outcome)
    return outcome


def _report_again(options: Namespace, flags: list[str]) -> None:
    """Writes the report of the results that a directory has."""
    command.require_only(options, ("report", "workdir"), "--report, which only reads results.json")
    if flags:
        raise UserError(f"{flags[0]} is not allowed with --report, which only reads results.json")
    write_report(options.workdir)
    print(f"report     {options.workdir}/report.html")


def write_report(workdir: str) -> None:
    """Writes the report of the results.json of a study's directory. Raises UserError if it is damaged."""
    from etils import epath

    from xfresearch.runtime.files import inside, read_object
    from xfresearch.studies import report

    results = read_object(inside(workdir, RESULTS))
    try:
        report.write(epath.Path(workdir), results)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration, RecursionError) as error:
        raise UserError(
            f"{workdir}/{RESULTS} is damaged or of another version ({type(error).__name__}: {error}): run the "
            "study again; it trains nothing that has ended"
        ) from error


def _compare(options: Namespace, flags: list[str]) -> None:
    """The report on existing runs."""
    command.require_only(options, ("runs", "workdir"), "--runs, which trains nothing")
    from etils import epath

    from xfresearch.compare import main as compare_main
    from xfresearch.runtime.files import check_output, exists
    from xfresearch.studies.preregistration import DESIGN

    for file, owner in ((DESIGN, "a study"), ("config.json", "a run")):
        if exists(epath.Path(options.workdir) / file):
            raise UserError(f"--workdir={options.workdir} is not allowed with --runs: {owner} has its report there")
    check_output("--workdir", f"{options.workdir}/report.html")
    files = {"--html": "report.html", "--json": "results.json"}
    for flag in flags:
        if flag.partition("=")[0] in files:
            raise UserError(f"{flag} is not allowed with --runs, which writes {' and '.join(files.values())} into --workdir")
    outputs = [word for flag, name in files.items() for word in (flag, f"{options.workdir}/{name}")]
    compare_main([*options.runs, *outputs, *flags])
    print(f"\nreport     {options.workdir}/report.html")


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.study", description=__doc__, epilog=EPILOG)
    made.add_argument("--config", metavar="FILE[:arg]", default="", help="the study: a name such as studies/w_o, or a file")
    arms = "make the study of these changes of --base: 'KEY=VALUE KEY=VALUE ...' each, perhaps after 'NAME: '"
    made.add_argument("--arms", nargs="+", default=(), metavar="CHANGE", help=arms)
    made.add_argument("--base", metavar="FILE[:arg]", default="", help=f"with --arms: config of the model (default: {BASE})")
    corpus = "with --arms: its text, such as notes/ or wikitext2 (default: the base's)"
    made.add_argument("--corpus", metavar="NAME|PATH", default="", help=corpus)
    runs = "report on these runs instead; the first is what the others are compared with"
    made.add_argument("--runs", nargs="+", default=(), metavar="RUN", help=runs)
    made.add_argument("--workdir", metavar="DIR", required=True, help="directory of the study, local or gs://")
    made.add_argument("--plan", action="store_true", help="print the plan, and end")
    made.add_argument("--time", action="store_true", help="print the plan, time an update of every arm, and end")
    made.add_argument("--report", action="store_true", help="write report and differences again from results.json, and end")
    jobs.add_flag(made.add_argument, "run")
    together = "train the runs of a cell that are ready in one program: where that is faster (default), always or never"
    made.add_argument("--together", choices=("auto", "always", "never"), metavar="WAY", help=together)
    reuse = "directories of other studies: a run whose config is the same is not trained again"
    add = "sizes of config.more_sizes that join the ladder of the directory, with all its runs"
    made.add_argument("--add-rung", nargs="+", default=(), metavar="SIZE", help=add)
    tracker = "wandb, mlflow, tensorboard, or jsonl (tracker/entries.jsonl): has every run that has ended, and the verdicts"
    made.add_argument("--tracker", choices=("wandb", "mlflow", "tensorboard", "jsonl"), metavar="NAME", help=tracker)
    made.add_argument("--reuse", nargs="+", default=(), metavar="DIR", help=reuse)
    return made


if __name__ == "__main__":
    command.run(main)
