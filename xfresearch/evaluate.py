"""python -m xfresearch.evaluate --workdir DIR [--step N | --all-steps] [--data CORPUS[:PATH]] [--stride N]
python -m xfresearch.evaluate (--workdir DIR | --compare DIR DIR) --tasks NAME,... [--task-data DIR] [--limit N]

Measures the held-out loss of a trained model with a sliding window: windows of --sequence-length tokens move by
--stride over the text. Every token but the first (of each document, for a run that packs documents) is scored once,
with more than length - stride tokens of context. The default stride is the whole length; training measures the same
loss. A data set with labels (docs/majority.md) is evaluated in whole sequences, without windows.
"""

import sys
from argparse import ArgumentTypeError
from functools import cache, partial

from xfresearch import command, distributed
from xfresearch.errors import UserError
from xfresearch.files import write_json
from xfresearch.harness import commands as task_commands
from xfresearch.tables import table

EPILOG = """\
examples:
  python -m xfresearch.evaluate --workdir runs/quickstart --stride 64
  python -m xfresearch.evaluate --workdir runs/a --all-steps --json curve.json
  python -m xfresearch.evaluate --workdir runs/a --data text_files:notes/*.txt --per-document
  python -m xfresearch.evaluate --workdir runs/a --tasks lambada,piqa --task-data data/eval
  python -m xfresearch.evaluate --compare runs/a runs/b --tasks lambada,piqa --task-data data/eval"""

COLUMNS = {
    "loss": ("loss", "{:.4f}"),
    "standard_error": ("+-", "{:.4f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "bits_per_character": ("bits/char", "{:.4f}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "tokens": ("tokens", "{:,}"),
    "bytes": ("bytes", "{:,}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    distributed.check(options)
    from xfresearch import loading

    # Error logs go to the run's directory, also if the path names a checkpoint.
    workdir, _ = loading.locate(options.workdir or options.compare[0])
    with distributed.joined(options, str(workdir)):
        if options.tasks:
            task_commands.run(options, open_model)
        else:
            evaluate(options, workdir)


def evaluate(options, workdir) -> None:
    """Measures the held-out loss as `options` say, and prints it."""
    from xfresearch.checkpoints import manifest, store

    if options.all_steps and not store.agreed_steps(workdir):
        raise UserError(f"--all-steps is not allowed with {workdir}: it has no checkpoints")
    lm, mesh = open_model(options.workdir, options.step)
    held_out = read_held_out(lm, workdir, options)
    manifest.require_same_everywhere({"checkpoint": str(lm.step), "held-out data": held_out.digest})
    if distributed.first():
        print(f"{held_out.corpus} {held_out.split}: {held_out.description}", file=sys.stderr)
    results = evaluate_steps(lm, workdir, held_out, options, mesh)
    if not distributed.first():
        return
    print(table({"step": [str(result["step"]) for result in results], **figures(results)}))
    print(f"loss in nats per {held_out.target}; +- is its standard error over {results[0]['units']} {held_out.unit}")
    if options.all_steps:
        name = "bits_per_byte" if "bits_per_byte" in results[0] else "accuracy"
        print(f"{COLUMNS[name][0]}  {sparkline([result[name] for result in results])}")
    if options.per_document:
        print(document_table(results[-1]["documents"]))
    if options.json:
        names = ("corpus", "split", "length", "stride", "unit")
        settings = {name: getattr(held_out, name) for name in names if hasattr(held_out, name)}
        measured = {"steps": results} if options.all_steps else results[0]
        write_json(options.json, {"workdir": options.workdir, **settings, **measured})


def read_held_out(lm, workdir, options):
    """The held-out data: labels if the model was trained on labels, otherwise text."""
    from xfresearch import evaluation
    from xfresearch.data.labels import trains_on_labels

    source = (lm, workdir, options.data, options.split, options.sequence_length)
    if not trains_on_labels(lm.run.data):
        return evaluation.read_text(*source, options.stride, options.limit)
    for name, given in (("stride", options.stride), ("per-document", options.per_document)):
        if given:
            raise UserError(f"--{name} is not allowed with {workdir}, which predicts labels: it applies to text only")
    return evaluation.read_labels(*source, options.limit)


def open_model(path: str, step: int | None):
    """The model at `path`, as xf.load reads it, and the mesh of its parameters (None: one device)."""
    from xfresearch import loading
    from xfresearch.data.cache import enable_compilation_cache

    run = loading.run_config(path)
    enable_compilation_cache(run.data)
    mesh = evaluation_mesh(run)
    return loading.load(path, step, mesh), mesh


def parse(arguments: list[str]):
    parser = command.Parser(prog="python -m xfresearch.evaluate", description=__doc__, epilog=EPILOG)
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    parser.add_argument("--workdir", metavar="DIR", default="", help=models)
    add = parser.add_argument
    positive = at_least(1)
    add("--step", type=int, metavar="N", help="checkpoint to evaluate (default: the newest)")
    add("--all-steps", action="store_true", help="evaluate every checkpoint of the run and print the curve")
    add("--data", default="", metavar="CORPUS[:PATH]", help="corpus to evaluate on (default: the run's first)")
    add("--split", default="", help="split of the corpus (default: the run's evaluation split)")
    add("--sequence-length", type=positive, default=0, metavar="N", help="tokens per window (default: as in training)")
    add("--stride", type=positive, default=0, metavar="N", help="tokens between windows (default: the window's length)")
    add(
        "--limit",
        type=at_least(0),
        default=0,
        metavar="N",
        help="evaluate only N sequences, the first N of a text (default 0: all)",
    )
    add("--per-document", action="store_true", help="also report the loss of every document")
    add("--batch-size", type=positive, default=0, metavar="N", help="sequences per batch (default: as in training)")
    add("--json", metavar="FILE", help="also write the results as JSON")
    task_commands.add_flags(parser, at_least(0))
    distributed.add_flags(parser)
    options = parser.parse_args(arguments)
    if bool(options.workdir) == bool(options.compare):
        raise UserError("exactly one of --workdir DIR and --compare DIR DIR is required (see --help)")
    task_commands.check(options)
    if options.all_steps and options.step is not None:
        raise UserError(f"--step={options.step} is not allowed with --all-steps: give one of the two")
    return options


def at_least(low: int):
    """An argparse type: integers of at least `low`."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < low:
            raise ArgumentTypeError(f"{text} is not allowed: it must be an integer of at least {low}")
        return int(text)

    return read


def evaluation_mesh(run):
    """The mesh for several processes: the `run`'s own if it fits their devices, otherwise a `data` mesh with all
    parameters on every device. None (one device) for a single process."""
    if not distributed.is_active():
        return None
    import jax

    from xfresearch.config.run import MeshConfig
    from xfresearch.sharding.mesh import device_mesh, mesh_sizes

    try:
        sizes = mesh_sizes(run.mesh, jax.device_count())
    except UserError:
        sizes = mesh_sizes(MeshConfig(), jax.device_count())
    return device_mesh(sizes, jax.devices(), run.mesh.between)


def evaluate_steps(lm, workdir, held_out, options, mesh=None) -> list[dict]:
    """The metrics of the model's own step, or of every step of the run. A warning names each damaged checkpoint, which
    is skipped."""
    from tqdm import tqdm

    from xfresearch import evaluation, loading
    from xfresearch.checkpoints import store
    from xfresearch.models.context import Execution
    from xfresearch.models.reach import trained_reach
    from xfresearch.sharding import placing

    training = lm.run.training
    make_scorer = cache(partial(evaluation.make_scorer, lm.config, training.layers, training.loss_rows, mesh))
    batch_size = min(evaluation.batch_size(lm.run, options.batch_size), len(held_out.rows))
    batch_size, place = placing.batch_placer(mesh, batch_size, held_out.length)
    results = []
    for step in store.agreed_steps(workdir) if options.all_steps else [lm.step]:
        try:
            params = lm.params if step == lm.step else loading.read_params(workdir, lm.config, step, mesh)
        except store.Corrupt as error:
            print(f"warning: {error}; skipped", file=sys.stderr)
            continue
        with tqdm(desc=f"step {step}", total=len(held_out.rows), unit="seq", disable=None, leave=False) as bar:
            scorer = make_scorer(Execution(reach=trained_reach(lm.config, params)))
            measured = measure(scorer, params, held_out, (batch_size, bar.update, place), lm.tokenizer, options)
        results.append({"step": step, **measured})
    return results


def measure(scorer, params, held_out, batching: tuple, tokenizer, options) -> dict:
    """The metrics of one step. `batching` holds the last arguments of evaluation.score_text and label_figures: batch
    size, progress and place."""
    from xfresearch import evaluation

    if isinstance(held_out, evaluation.Labels):
        return evaluation.label_figures(scorer, params, held_out, *batching)
    scores = evaluation.score_text(scorer, params, held_out, *batching)
    figures = evaluation.text_figures(held_out, scores)
    if options.per_document:
        figures["documents"] = evaluation.document_figures(held_out, scores, tokenizer)
    return figures


def figures(results: list[dict]) -> dict[str, list[str]]:
    """{header: cells} of the table of `results`, a row for each."""
    known = {name: column for name, column in COLUMNS.items() if name in results[0]}
    return {title: [form.format(result[name]) for result in results] for name, (title, form) in known.items()}


def document_table(documents: list[dict], shown: int = 5) -> str:
    """The documents with the highest and the lowest bits per byte."""
    ranked = sorted(documents, key=lambda document: -document["bits_per_byte"])
    lines = []
    for title, part in (("worst", ranked[:shown]), ("best", ranked[shown:][-shown:])):
        if part:
            names = {"document": [str(d["document"]) for d in part]}
            beginnings = {"starts": [repr(d["starts"]) for d in part]}
            lines += [
                f"{title} documents by bits/byte (of {len(documents)})",
                table(names | figures(part) | beginnings),
            ]
    return "\n".join(lines)


def sparkline(values: list[float]) -> str:
    """The first value, one bar per value (higher for a higher value), and the last value."""
    bars = "▁▂▃▄▅▆▇█"
    low, high = min(values), max(values)
    heights = [int((value - low) / (high - low or 1) * (len(bars) - 1)) for value in values]
    return f"{values[0]:.4f} {''.join(bars[h] for h in heights)} {values[-1]:.4f}"


if __name__ == "__main__":
    command.run(main)
