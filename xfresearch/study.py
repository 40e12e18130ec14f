"""python -m xfresearch.study --config FILE[:arg] --workdir DIR [--plan] [--cell I] [--reuse DIR ...]
                          [--config.key=value ...]
python -m xfresearch.study --runs RUN RUN ... --workdir DIR [flags of xfresearch.compare]

Answers a question by experiment: arms at equal cost, tuned learning rates, paired seeds, and a verdict with intervals.
With --runs it trains nothing, and writes the report of xfresearch.compare on existing runs.
"""

import os

from xfresearch import command
from xfresearch.errors import UserError

JOB_NUMBERS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # of an array of Slurm, and of an indexed job of GKE

EPILOG = """\
examples:
  python -m xfresearch.study --config configs/studies/w_o.py:tiny --workdir studies/try
  python -m xfresearch.study --config configs/studies/w_o.py --workdir studies/w_o --plan
  python -m xfresearch.study --config configs/studies/w_o.py --workdir gs://bucket/w_o --cell auto
  python -m xfresearch.study --runs runs/a runs/b --workdir studies/a_and_b

The same command again goes on where it stopped; when all runs have ended, it writes the report. docs/studies.md explains."""


def main(arguments: list[str]) -> None:
    options, overrides = _parser().parse_known_args(arguments)
    if options.runs:
        return _compare(options, overrides)
    if not options.config:
        raise UserError("--config FILE or --runs RUN RUN ... is required (see --help)")
    from xfresearch.studies import conducting, design, report, running
    from xfresearch.studies.cells import cells, jobs

    study = design.read(["--config", options.config, *overrides])
    store = running.open_store(options.workdir, options.reuse)
    chosen = cells(study) if options.cell is None else _job(jobs(study), options.cell)
    planned = _plan(study, store, options)
    if options.plan:
        return
    conducting.keep_design(study, options.workdir)
    found = conducting.conduct(study, store, planned.matched, chosen)
    left = conducting.left(study, found)
    if left:
        print(f"no report yet: {len(left)} of {len(cells(study))} cells have not ended ({', '.join(map('/'.join, left))})")
        return
    results = conducting.write_report(study, store, planned.matched, found)
    print("\n".join(["", *report.verdicts(results), "", f"report     {options.workdir}/report.html"]))


def _plan(study, store, options):
    """Prints the plan and returns it. Updates are timed if the plan needs it, and the directory keeps their seconds."""
    from xfresearch.studies import conducting, plan
    from xfresearch.studies.cells import cells
    from xfresearch.studies.design import config_of

    seconds = conducting.read_seconds(options.workdir)
    if study.match == "seconds":  # the plan needs them
        if options.cell is not None and not seconds.keys() >= set(cells(study)):
            raise UserError(
                f"--cell={options.cell} is not allowed with config.match='seconds' before updates were timed: run the "
                f"command once with --plan, which keeps the times in {options.workdir}"
            )
        seconds = plan.timings(study, {cell: config_of(study, *cell) for cell in cells(study)}, seconds)
    planned = plan.make(study, seconds)
    print("\n".join(plan.lines(study, planned)), flush=True)
    if options.plan or (options.cell is None and conducting.starts(study, store, planned.matched)):
        seconds = plan.timings(study, {cell: each.config for cell, each in planned.matched.items()}, seconds)
        print(plan.time_line(study, planned, seconds), flush=True)
    conducting.keep_seconds(seconds, options.workdir)
    return planned


def _compare(options, flags: list[str]) -> None:
    """The report on existing runs."""
    from etils import epath

    from xfresearch import compare

    for name in ("config", "plan", "cell", "reuse"):
        if getattr(options, name):
            raise UserError(f"--{name} is not allowed with --runs, which trains nothing")
    epath.Path(options.workdir).mkdir(parents=True, exist_ok=True)
    files = {"--html": "report.html", "--json": "results.json"}
    outputs = [word for flag, name in files.items() for word in (flag, f"{options.workdir}/{name}")]
    compare.main([*options.runs, *outputs, *flags])
    print(f"\nreport     {options.workdir}/report.html")


def _job(every: list[list], text: str) -> list:
    """The cells of the job with a number, or with that of the job of an array."""
    if text == "auto":
        text = next((os.environ[name] for name in JOB_NUMBERS if name in os.environ), text)
    if not text.isdecimal() or int(text) >= len(every):
        allowed = f"at least 0 and at most {len(every) - 1}, or 'auto' in a job that has {' or '.join(JOB_NUMBERS)}"
        raise UserError(f"--cell={text} is not allowed: it must be {allowed}")
    return every[int(text)]


def _parser() -> command.Parser:
    parser = command.Parser(prog="python -m xfresearch.study", description=__doc__, epilog=EPILOG)
    parser.add_argument("--config", metavar="FILE[:arg]", default="", help="config file of the study (configs/studies/)")
    runs = "report on these runs instead; the first is what the others are compared with"
    parser.add_argument("--runs", nargs="+", default=(), metavar="RUN", help=runs)
    parser.add_argument("--workdir", metavar="DIR", required=True, help="directory of the study, local or gs://")
    parser.add_argument("--plan", action="store_true", help="print the plan, and end")
    numbers = " or ".join(f"${name}" for name in JOB_NUMBERS)
    cell = "run one job: the I-th cell of the plan, from 0, or with config.tune_at the I-th arm at all sizes; "
    cell += f"'auto' for the number in {numbers}"
    parser.add_argument("--cell", metavar="I", help=cell)
    reuse = "directories of other studies: a run whose config is the same is not trained again"
    parser.add_argument("--reuse", nargs="+", default=(), metavar="DIR", help=reuse)
    return parser


if __name__ == "__main__":
    command.run(main)
