"""python -m xfresearch.analyze NAME --workdir DIR [--step N|all] [--data CORPUS[:PATH]] [--to DIR]
python -m xfresearch.analyze --list [--workdir DIR]

Looks inside a trained model. NAME is an analysis: --list says which there are, and with --workdir which apply to that
model. This writes data.json (numbers), arrays.npz, the pictures and report.html, by default to DIR/analysis/NAME. With
--step all it runs on every checkpoint of a run, and the report has curves over training.
"""

import sys
from collections.abc import Iterator

from xfresearch import command, held_out
from xfresearch.errors import UserError, nearest
from xfresearch.tables import table

FLAGS = ("corpora", "clean", "corrupted", "answers", "receiver", "tap", "target", "sizes", "k", "steps")  # of some analyses
FLAGS += ("window", "samples")
EPILOG = """\
examples:
  python -m xfresearch.analyze attention --workdir runs/quickstart
  python -m xfresearch.analyze norms --workdir runs/quickstart --step all
  python -m xfresearch.analyze patching --workdir runs/a --clean "x = a + b" --corrupted "x = a * b"
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
    lm = opened(options)
    reason = ANALYSES[options.name].applies(lm.config)
    if reason:
        raise UserError(f"{options.name} does not apply to {options.workdir}: {reason}")
    analysis = ANALYSES[options.name]
    arguments = settings(options, analysis)
    if options.step == "all" and analysis.takes("against"):
        arguments["against"] = lm
    results = []
    for each in steps(options, lm):
        state = {"resume": target / f"unfinished_{each.step}.npz"} if analysis.takes("resume") else {}
        results.append(analysis.run(each, **arguments, **state))
    write(target, results)
    for file in target.glob("unfinished_*.npz"):
        file.unlink()
    print(shown(results[-1]))
    step = results[-1].step
    print(f"{options.name}{f' of step {step:,}' if step else ''}: {target}/report.html", file=sys.stderr)


def parse(arguments: list[str]):
    parser = command.Parser(prog="python -m xfresearch.analyze", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("name", nargs="?", default="", metavar="NAME", help="the analysis")
    add("--list", action="store_true", help="list the analyses, and with --workdir whether they apply to the model")
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    add("--workdir", metavar="DIR", default="", help=models)
    add("--step", default="", metavar="N|all", help="checkpoint to analyse (default: the newest), or all of a run")
    help_data = "corpus to run on (default: the run's first, held-out part); recall, trace: facts[:PATH]; trace: FILE.json"
    add("--data", default="", metavar="CORPUS[:PATH]", help=help_data)
    help_rows = "rows of tokens, or facts (default: that of the analysis)"
    add("--rows", type=held_out.at_least(1), default=0, metavar="N", help=help_rows)
    help_length = "tokens per row (default: as in training)"
    add("--sequence-length", type=held_out.at_least(2), default=0, metavar="N", help=help_length)
    help_corpora = "routing: more corpora, to compare the experts that they use"
    add("--corpora", nargs="+", default=(), metavar="CORPUS[:PATH]", help=help_corpora)
    help_window = "trace: layers of a window (default: the share of the paper, 10 of 48)"
    add("--window", type=held_out.at_least(1), default=0, metavar="N", help=help_window)
    help_samples = "trace: draws of the noise for each fact"
    add("--samples", type=held_out.at_least(1), default=0, metavar="N", help=help_samples)
    add("--clean", default="", metavar="TEXT", help="patching: the prompt whose values are patched")
    add("--corrupted", default="", metavar="TEXT", help="patching: the prompt into which they are, of as many tokens")
    add("--answers", nargs=2, metavar="TOKEN", help="patching: the two answers (default: the tokens that change most)")
    help_receiver = "patching: sublayer that direct paths lead to, such as blocks.3.attention (default: final, the head)"
    add("--receiver", default="", metavar="NAME", help=help_receiver)
    add("--tap", default="", metavar="NAME", help="features: the tap to read (default: the stream after the middle layer)")
    add("--target", default="", metavar="NAME", help="features: the tap to predict (default: the one that is read)")
    help_sizes = "features: numbers of features of the dictionaries (default: 2, 4 and 8 times the width of the tap)"
    add("--sizes", nargs="+", type=held_out.at_least(1), default=(), metavar="N", help=help_sizes)
    add("--k", type=held_out.at_least(1), default=0, metavar="N", help="features: mean number of features of a token")
    help_steps = "features, tuned_lens: batches of training (default: that of the analysis)"
    add("--train-steps", dest="steps", type=held_out.at_least(1), default=0, metavar="N", help=help_steps)
    add("--to", default="", metavar="DIR", help="directory of the results (default: DIR/analysis/NAME of a run)")
    options = parser.parse_args(arguments)
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
        from xfresearch import loading

        model = loading.stored(workdir).model
        columns["applies"] = [each.applies(model) or "yes" for each in ANALYSES.values()]
    return table(columns)


def directory(options):
    """Where the results go. Raises UserError if it cannot be decided."""
    from etils import epath

    from xfresearch import loading
    from xfresearch.files import exists

    if options.to:
        return epath.Path(options.to).expanduser()
    workdir, _ = loading.locate(options.workdir)
    if not exists(workdir / "checkpoints"):
        raise UserError(f"--to is required with {options.workdir}, which is not a run's directory")
    return workdir / "analysis" / options.name


def opened(options):
    """The model, at the step of the options or at the newest one."""
    from xfresearch import loading

    step = int(options.step) if options.step.isdecimal() else None
    return loading.load(options.workdir, step)


def steps(options, lm) -> Iterator:
    """The model at each step that is asked for, one at a time."""
    if options.step != "all":
        yield lm
        return
    from xfresearch import loading
    from xfresearch.checkpoints import store

    workdir, _ = loading.locate(options.workdir)
    found = store.agreed_steps(workdir)
    if not found:
        raise UserError(f"--step=all is not allowed with {options.workdir}: it has no checkpoints")
    for step in found:
        yield lm if step == lm.step else loading.load(workdir, step)


def settings(options, analysis) -> dict:
    """The arguments of an analysis. Raises UserError for flags that it does not take."""
    from xfresearch.analysis.registry import ANALYSES

    given = {"data": options.data or None, "count": options.rows, "length": options.sequence_length}
    given |= {name: getattr(options, name) for name in FLAGS}
    given = {name: value for name, value in given.items() if value}
    flags = {"count": "--rows", "length": "--sequence-length", "steps": "--train-steps"}
    for name in given:
        if not analysis.takes(name):
            takers = [each for each, found in ANALYSES.items() if found.takes(name)]
            flag = flags.get(name, f"--{name}")
            raise UserError(f"{flag} is not allowed with {options.name}: it is a flag of {', '.join(takers)}")
    if analysis.prompts and not (options.clean and options.corrupted):
        raise UserError(f"{options.name} needs --clean TEXT and --corrupted TEXT")
    return given


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
    return table({"figure": names, "value": cells, "+-": halves})


if __name__ == "__main__":
    command.run(main)
