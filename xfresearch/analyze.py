"""python -m xfresearch.analyze NAME --workdir DIR [--step N|all] [--data CORPUS[:PATH]] [--to DIR]
python -m xfresearch.analyze --list [--workdir DIR]

Looks inside a trained model. NAME is an analysis: --list says which there are, and with --workdir which apply to that
model. This writes data.json (numbers), arrays.npz, the pictures and report.html, by default to DIR/analysis/NAME. With
--step all it runs on every checkpoint of a run, and the report has curves over training.
"""

import sys
from collections.abc import Iterator

from xfresearch.runtime import arguments as flags
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import check_output, exists, files_in, inside, remove, write_json
from xfresearch.runtime.tables import PLUS_MINUS, table

EPILOG = """\
examples:
  python -m xfresearch.analyze attention --workdir runs/quickstart
  python -m xfresearch.analyze norms --workdir runs/quickstart --step all
  python -m xfresearch.analyze patching --workdir runs/a --clean "x = a + b" --corrupted "x = a * b"
  python -m xfresearch.analyze attention --workdir runs/reverse --source "abc" "xy" --text "cba" "yx"
  python -m xfresearch.analyze patching --workdir runs/reverse --source "abc" "abd"
  python -m xfresearch.analyze features --workdir runs/a --tap blocks.1.feed_forward.out --sizes 512 2048
  python -m xfresearch.analyze --list --workdir ~/models/gpt2"""


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    from xfresearch.analysis.registry import ANALYSES

    if options.list:
        print(listed(options.workdir))
        return
    if options.name not in ANALYSES:
        hint = nearest(options.name, ANALYSES)
        raise UserError(f"analysis {options.name!r} is not allowed: it must be one of {', '.join(ANALYSES)}{hint}")
    target = directory(options)
    check_output("--to" if options.to else "--workdir", f"{target}/data.json")
    lm = opened(options)
    reason = ANALYSES[options.name].applies(lm.config)
    if reason:
        raise UserError(f"{options.name} does not apply to {options.workdir}: {reason}")
    analysis = ANALYSES[options.name]
    given = settings(options, analysis)
    if options.step == "all" and analysis.takes("against"):
        given["against"] = lm
    results: list = []
    for each in steps(options, lm):
        state = {"resume": target / f"unfinished_{each.step}.npz"} if analysis.takes("resume") else {}
        result = analysis.run(each, **given, **state)
        results = [*(before.brief() for before in results), result]  # arrays of the last step alone are written
    write(target, results)
    if options.json:
        outcomes = [each.as_dict() for each in results]
        write_json(options.json, outcomes if options.step == "all" else outcomes[0])
    for file in files_in(target, pattern="unfinished_*.npz"):
        remove(file)
    print(shown(results[-1]))
    step = results[-1].step
    print(f"{options.name}{f' of step {step:,}' if step else ''}: {target}/report.html", file=sys.stderr)


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.analyze", description=__doc__, epilog=EPILOG)
    add = made.add_argument
    add("name", nargs="?", default="", metavar="NAME", help="the analysis")
    add("--list", action="store_true", help="list the analyses, and with --workdir whether they apply to the model")
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    add("--workdir", metavar="DIR", default="", help=models)
    add("--step", default="", metavar="N|all", help="checkpoint to analyse (default: the newest good one), or all of a run")
    flags.add_flags(made)
    help_text = "texts to run on in place of a corpus: targets of the texts of --source"
    add("--text", nargs="+", metavar="TEXT", help=help_text)
    add("--to", default="", metavar="DIR", help="directory of the results (default: DIR/analysis/NAME of a run)")
    help_json = "also write the figures as JSON; with --step all a list of those of each step"
    add("--json", metavar="FILE", help=help_json)
    return made


def parse(arguments: list[str]):
    options = parser().parse_args(arguments)
    if options.step not in ("", "all") and not options.step.isdecimal():
        raise UserError(f"--step={options.step} is not allowed: it must be a number or all")
    if not options.list and not (options.name and options.workdir):
        raise UserError("NAME and --workdir are required, or --list (see --help)")
    return options


def listed(workdir: str) -> str:
    """The table of all analyses."""
    from xfresearch.analysis.registry import ANALYSES

    columns = {"analysis": list(ANALYSES), "about": [each.about for each in ANALYSES.values()]}
    if workdir:
        from xfresearch.loading import loading

        model = loading.stored(workdir).model
        columns["applies"] = [each.applies(model) or "yes" for each in ANALYSES.values()]
    return table(columns)


def directory(options):
    """Where the results go. Raises UserError if it cannot be decided."""
    from etils import epath

    from xfresearch.loading import loading

    if options.to:
        return epath.Path(options.to).expanduser()
    workdir, _ = loading.locate(options.workdir)
    if not exists(workdir / "checkpoints"):
        raise UserError(f"--to is required with {options.workdir}, which is not a run's directory")
    return inside(workdir, "analysis", options.name)


def opened(options):
    """The model, at the step of the options or at the newest one."""
    from xfresearch.loading import loading

    step = int(options.step) if options.step.isdecimal() else None
    return loading.load(options.workdir, step)


def steps(options, lm) -> Iterator:
    """The model at each step that is asked for, one at a time."""
    if options.step != "all":
        yield lm
        return
    from xfresearch.checkpoints import store
    from xfresearch.loading import loading

    workdir, _ = loading.locate(options.workdir)
    saved = store.agreed_steps(workdir)
    if not saved:
        raise UserError(f"--step=all is not allowed with {options.workdir}: it has no checkpoints")
    for step in saved:
        try:
            model = lm if step == lm.step else loading.load(workdir, step)
        except UserError as error:
            if step in store.agreed_steps(workdir):
                raise
            print(f"warning: {error}; skipped", file=sys.stderr)  # the run has deleted it meanwhile
            continue
        yield model


def settings(options, analysis) -> dict:
    """The arguments of an analysis. Raises UserError for flags that it does not take."""
    from xfresearch.analysis.registry import ANALYSES

    known = flags.ARGUMENTS
    given = {name: value for name in known if (value := getattr(options, name)) is not None}
    for name in given:
        if not analysis.takes(name):
            takers = [other for other, each in ANALYSES.items() if each.takes(name)]
            raise UserError(f"{flags.flag(name)} is not allowed with {options.name}: it is a flag of {', '.join(takers)}")
    if analysis.prompts and not (options.clean and options.corrupted or options.source):
        raise UserError(f"{options.name} needs --clean TEXT and --corrupted TEXT, or --source TEXT TEXT with an encoder")
    return given | texts(options, analysis)


def texts(options, analysis) -> dict:
    """The data of --text. Raises UserError if it is not allowed, or if --source needs it."""
    if options.text is None:
        if options.source and not analysis.prompts:
            raise UserError(f"--source needs --text with {options.name}: the target of each source")
        return {}
    if options.data or not (analysis.takes("data") and analysis.takes("source")):
        beside = "--data" if options.data else options.name
        raise UserError(f"--text is not allowed with {beside}: it stands for the rows of a corpus")
    unread = ["sequence_length"] if options.corpora else ["sequence_length", "count"]  # rows of --corpora are read
    if set_ := [flags.flag(name) for name in unread if getattr(options, name) is not None]:
        raise UserError(f"{set_[0]} is not allowed with --text: the texts are the rows, as long as they are")
    return {"data": options.text}


def write(target, results: list) -> None:
    """Writes the results: those of the last step, and with several steps the curves over them."""
    from xfresearch.analysis.result import write_series

    results[-1].save(target)
    if len(results) > 1:
        write_series(target, results)


def shown(result) -> str:
    """The summary as a table."""
    names = list(result.summary)
    cells = [f"{value:.4f}" for value, _ in result.summary.values()]
    halves = [f"{half:.4f}" if half == half else "" for _, half in result.summary.values()]
    return f"{table({'figure': names, 'value': cells, '+-': halves})}\n{PLUS_MINUS}"


if __name__ == "__main__":
    command.run(main)
