"""python -m xfresearch.study --config FILE[:arg] --workdir DIR [--plan] [--cell I] [--config.key=value ...]

Answers a question by experiment: arms at equal cost, tuned learning rates, paired seeds, and a verdict with intervals.
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

The same command again goes on where it stopped; when all runs have ended, it writes the report. docs/studies.md explains."""


def main(arguments: list[str]) -> None:
    options, overrides = _parser().parse_known_args(arguments)
    from xfresearch.studies import conducting, design, plan, report
    from xfresearch.studies.cells import cells

    study = design.read(["--config", options.config, *overrides])
    planned = plan.make(study)
    every = cells(study)
    chosen = every if options.cell is None else [_cell(every, options.cell)]
    first = options.plan or (options.cell is None and not conducting.begun(options.workdir))
    print("\n".join(plan.lines(study, plan.timed(planned) if first else planned)), flush=True)
    if options.plan:
        return
    conducting.keep_design(study, options.workdir)
    found = conducting.conduct(study, options.workdir, planned.matched, chosen)
    left = conducting.left(study, found)
    if left:
        print(f"no report yet: {len(left)} of {len(every)} cells have not ended ({', '.join(map('/'.join, left))})")
        return
    results = conducting.write_report(study, options.workdir, planned.matched, found)
    print("\n".join(["", *report.verdicts(results), "", f"report     {options.workdir}/report.html"]))


def _cell(every: list, text: str):
    """The cell with a number, or with that of the job of an array."""
    if text == "auto":
        text = next((os.environ[name] for name in JOB_NUMBERS if name in os.environ), text)
    if not text.isdecimal() or int(text) >= len(every):
        allowed = f"at least 0 and at most {len(every) - 1}, or 'auto' in a job that has {' or '.join(JOB_NUMBERS)}"
        raise UserError(f"--cell={text} is not allowed: it must be {allowed}")
    return every[int(text)]


def _parser() -> command.Parser:
    parser = command.Parser(prog="python -m xfresearch.study", description=__doc__, epilog=EPILOG)
    parser.add_argument("--config", metavar="FILE[:arg]", required=True, help="config file of the study (configs/studies/)")
    parser.add_argument("--workdir", metavar="DIR", required=True, help="directory of the study, local or gs://")
    parser.add_argument("--plan", action="store_true", help="print the plan, and end")
    numbers = " or ".join(f"${name}" for name in JOB_NUMBERS)
    cell = f"run one cell, an arm at a size: the I-th of the plan, from 0; 'auto' for that of {numbers}"
    parser.add_argument("--cell", metavar="I", help=cell)
    return parser


if __name__ == "__main__":
    command.run(main)
