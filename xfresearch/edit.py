"""python -m xfresearch.edit rome|memit|finetune|constrained_finetune --workdir W --request FILE.json --to W2
python -m xfresearch.edit undo --workdir W2 --to W3
python -m xfresearch.edit --diff W W2

Edits facts in a model: W2 is W with the new objects, a record of the edit, and the arrays before it. requests.json is a list
of {"subject": ..., "prompt": "... {} ...", "target": the object before, "target_new": the new one}; for a model that was
trained on a corpus of facts, "relation" can stand for the prompt. undo takes back the last edit, bit for bit. --diff shows
which arrays of two models differ. docs/editing.md explains methods and metrics.
"""

from xfresearch.evaluation import held_out
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError, require_new
from xfresearch.runtime.tables import table

METHODS = ("rome", "memit", "finetune", "constrained_finetune")
EPILOG = """\
examples:
  python -m xfresearch.edit rome --workdir runs/facts --request requests.json --to runs/edited
  python -m xfresearch.edit memit --workdir runs/facts --draw 100 --to runs/edited
  python -m xfresearch.edit rome --workdir runs/facts --draw 50 --alone --to runs/facts/alone
  python -m xfresearch.edit undo --workdir runs/edited --to runs/restored
  python -m xfresearch.edit --diff runs/facts runs/edited"""
# The flags that some methods take, and the names of their arguments.
FLAGS = {"data": "--data", "tokens": "--tokens", "key": "--key", "ridge": "--ridge", "weight": "--weight", "rate": "--rate"}
FLAGS |= {"largest": "--largest", "steps": "--steps", "seed": "--seed", "prompts": "--prompts"}


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.diff:
        diff(options)
    elif options.method == "undo":
        undo(options)
    else:
        edit(options)


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.edit", description=__doc__, epilog=EPILOG)
    add = made.add_argument
    help_method = f"{', '.join(METHODS)} or undo"
    add("method", nargs="?", default="", choices=("", *METHODS, "undo"), metavar="METHOD", help=help_method)
    add("--workdir", metavar="DIR", default="", help="a run's directory, one of its checkpoints, or a Hugging Face folder")
    add("--step", type=held_out.at_least(0), metavar="N", help="step of the checkpoint (default: the newest good one)")
    help_request = "JSON list of requests, also in the forms of CounterFact, zsRE, KnowEdit and MQuAKE"
    add("--request", metavar="FILE", default="", help=help_request)
    help_draw = "instead: N requests from the facts of the model's data"
    add("--draw", type=held_out.at_least(1), default=0, metavar="N", help=help_draw)
    add("--to", metavar="DIR", default="", help="a new directory")
    help_memory = "memories to edit, such as blocks.3.feed_forward (default: by the model's own trace of the requests)"
    add("--memory", default="", metavar="NAME[,NAME]", help=help_memory)
    add("--alone", action="store_true", help="edit the model with each request alone, and write the report only, no model")
    help_prompts = "paraphrases, neighbours and consequences of a request that are asked (default: all)"
    add("--prompts", type=held_out.at_least(1), metavar="N", help=help_prompts)
    add("--data", metavar="CORPUS", help="rome, memit: corpus of the covariance (default: the run's first)")
    add("--tokens", type=held_out.at_least(1), metavar="N", help="rome, memit: tokens of the covariance")
    help_key = "rome: mean, or published: the two keys of its code; memit: the key after each prefix, or their mean"
    add("--key", choices=("mean", "published", "each"), help=help_key)
    add("--ridge", type=float, metavar="R", help="rome, memit: added to the covariance's diagonal, relative")
    add("--weight", type=float, metavar="A", help="memit: weight of other keys, for each coefficient")
    add("--rate", type=float, metavar="R", help="fine-tuning: learning rate")
    add("--steps", type=held_out.at_least(1), metavar="N", help="fine-tuning: steps, at most")
    add("--largest", type=float, metavar="X", help="constrained_finetune: largest change of a parameter")
    add("--seed", type=int, metavar="N", help="rome, memit: of the prefixes; with --draw of the requests")
    add("--diff", nargs=2, metavar="DIR", help="show which arrays of two models differ, and by how much")
    add("--json", metavar="FILE", help="also write the report, or the differences, as JSON")
    return made


def parse(arguments: list[str]):
    options = parser().parse_args(arguments)
    if options.diff:
        if options.method:
            raise UserError(f"--diff is not allowed with {options.method}")
        command.require_only(options, ("diff", "json"), "--diff")
        return options
    if not (options.method and options.workdir and options.to):
        raise UserError("METHOD, --workdir and --to are required, or --diff (see --help)")
    if options.method == "undo":
        command.require_only(options, ("method", "workdir", "step", "to"), "undo")
    elif bool(options.request) == bool(options.draw):
        raise UserError(f"{options.method} needs --request FILE or --draw N, one of the two")
    return options


def edit(options) -> None:
    """Edits a model, and writes it with the report."""
    require_new(options.to, "edit")
    from etils import epath

    from xfresearch import editing
    from xfresearch.data.records import read_records
    from xfresearch.editing.requests import known_facts
    from xfresearch.loading import loading
    from xfresearch.runtime.files import check_parent

    check_parent("--to", epath.Path(options.to).expanduser())

    method = editing.METHODS[options.method]
    given = settings(options, method) | memories(options)
    requests = read_records(options.request) if options.request else None
    lm = loading.load(options.workdir, options.step)
    if requests is None:
        requests = editing.drawn(_facts(options, known_facts(lm)), options.draw, options.seed or 0)
    edited, report = method(lm, requests, **given, alone=options.alone)
    write(options, edited, report)
    print(shown(report))


def settings(options, method) -> dict:
    """The arguments of the method. Raises UserError for flags that it does not take."""
    import inspect

    from xfresearch.editing import METHODS as functions

    given = {name: getattr(options, name) for name in FLAGS if getattr(options, name) is not None}  # 0 is given, too
    if options.draw:
        given.pop("seed", None)
    for name in given:
        if name not in inspect.signature(method).parameters:
            takers = [each for each in METHODS if name in inspect.signature(functions[each]).parameters]
            raise UserError(f"{FLAGS[name]} is not allowed with {options.method}: it is a flag of {', '.join(takers)}")
    return given


def memories(options) -> dict:
    """The memories to edit, as an argument of the method, which checks them. Raises UserError for too many."""
    given = tuple(options.memory.split(",")) if options.memory else ()
    if options.method == "memit":
        return {"memories": given}
    if len(given) > 1:
        raise UserError(f"--memory={options.memory} is not allowed with {options.method}: it must be one memory")
    return {"memory": options.memory}


def _facts(options, known):
    if known is None:
        what = "its data are not a corpus of facts that you have given"
        raise UserError(f"--draw is not allowed with {options.workdir}: {what}")
    return known


def write(options, edited, report) -> None:
    """Writes the edited model and its report, or the report alone; whole or not at all."""
    from etils import epath

    from xfresearch.loading.edits import FOLDER, RECORD
    from xfresearch.runtime.files import new_directory, write_json

    with new_directory(epath.Path(options.to).expanduser(), "edit") as directory:
        at = directory
        if options.alone:
            write_json(directory / RECORD, report.as_dict())
        else:
            edited.save(directory)
            at = directory / FOLDER / str(len(edited.edits) - 1)
        report.result(edited.step).save(at)
    if options.json:
        write_json(options.json, report.as_dict())


def shown(report) -> str:
    """The metrics and the failures."""
    rows = report.summary()
    columns = {"metric": list(rows)}
    for number, name in enumerate(("before", "after", "low", "high")):
        columns[name] = [f"{row[number]:.3f}" if row[number] == row[number] else "" for row in rows.values()]
    before, after = report.drift_before, report.drift_after
    known = before.bits_per_byte == before.bits_per_byte
    bits = f"{before.bits_per_byte:.3f} -> {after.bits_per_byte:.3f}" if known else "not known: no held-out text"
    lines = [table(columns), f"bits per byte {bits}"]
    if after.others == after.others:
        lines.append(f"other facts recalled {before.others:.3f} -> {after.others:.3f}")
    made = len(report.edits) - len({line.split(":")[0] for line in report.failures if line.startswith("request")})
    lines.append(f"{made} of {len(report.edits)} requests made, in {', '.join(report.edits[0].memories)}")
    return "\n".join([*lines, *(f"failed: {line}" for line in report.failures)])


def undo(options) -> None:
    """Takes back the last edit."""
    require_new(options.to, "undo")
    from xfresearch.loading import edits, loading

    lm = loading.load(options.workdir, options.step)
    if not lm.edits:
        raise UserError(f"{options.workdir} has no edit to undo")
    params = edits.undone(lm.config, lm.params, lm.edits[-1])
    lm.with_params(params, lm.edits[:-1]).save(options.to)
    record = lm.edits[-1].record
    print(f"{options.to}: without {record['method']} of {len(record['requests'])} requests; edits left: {len(lm.edits) - 1}")


def diff(options) -> None:
    """Shows which arrays of two models differ, and by how much."""
    from xfresearch.loading import edits, loading
    from xfresearch.runtime.files import write_json

    a, b = (loading.load(path) for path in options.diff)
    differences = edits.differences(a, b)
    columns = {"array": list(differences)}
    for name, form in {"numbers": ",", "different": ",", "relative": ".3g", "largest": ".3g"}.items():
        columns[name] = [f"{row[name]:{form}}" for row in differences.values()]
    print(table(columns) if differences else "no array differs")
    if options.json:
        write_json(options.json, differences)


if __name__ == "__main__":
    command.run(main)
