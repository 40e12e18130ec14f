"""python -m xfresearch.evaluate --workdir DIR [--step N | --all-steps [--job I]] [--data CORPUS[:PATH]] [--stride N]
python -m xfresearch.evaluate --workdir DIR --tasks NAME,... [--task-data DIR] [--limit N]

Measures the held-out loss of a trained model with a sliding window: windows of --sequence-length tokens move by
--stride over the text. Every token but the first (of each document, for a run that packs documents) is scored once,
with more than length - stride tokens of context. The default stride is the whole length; training measures the same
loss. Other predictions than next tokens (docs/objectives.md) are evaluated in whole sequences, without windows.
xfresearch.compare compares several models.
"""

import math
import sys

from xfresearch.evaluation import held_out
from xfresearch.harness import commands as task_commands
from xfresearch.runtime import command, distributed, jobs
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_json
from xfresearch.runtime.tables import table

EPILOG = """\
examples:
  python -m xfresearch.evaluate --workdir runs/quickstart --stride 64
  python -m xfresearch.evaluate --workdir runs/a --all-steps --json curve.json
  python -m xfresearch.evaluate --workdir gs://bucket/a --all-steps --job auto
  python -m xfresearch.evaluate --workdir runs/a --data text_files:notes/*.txt --per-document
  python -m xfresearch.evaluate --workdir runs/sort --decode exact_match --limit 500
  python -m xfresearch.evaluate --workdir runs/a --tasks lambada,piqa --task-data data/eval"""

COLUMNS = {
    "loss": ("loss", "{:.4f}"),
    "standard_error": ("std. error", "{:.4f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "bits_per_character": ("bits/char", "{:.4f}"),
    "unknown_tokens": ("unknown", "{:.1%}"),
    "lost_bytes": ("lost text", "{:.1%}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "pseudo_perplexity": ("pseudo-perplexity", "{:.2f}"),
    "exact_match": ("exact match", "{:.2%}"),
    "bleu": ("BLEU", "{:.2f}"),
    "chrf": ("chrF", "{:.2f}"),
    "accepted": ("accepted", "{:.2%}"),
    "divergence": ("divergence", "{:.4f}"),
    "bits_per_person": ("bits/person", "{:.2f}"),
    "bits_per_parameter": ("bits/parameter", "{:.4f}"),
    "tokens": ("tokens", "{:,}"),
    "bytes": ("bytes", "{:,}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    distributed.check(options)
    from xfresearch.loading import loading

    # Error logs go to the run's directory, also if the path names a checkpoint.
    workdir, _ = loading.locate(options.workdir)
    if options.job == jobs.COUNT:
        return print(len(saved(workdir)))
    with distributed.joined(options, str(workdir)):
        if options.tasks:
            steps: list[int | None] = [*saved(workdir)] if options.all_steps else [options.step]
            task_commands.run(options, steps)
        else:
            evaluate(options, workdir)


def saved(workdir) -> list[int]:
    """The steps with a good checkpoint, in every process. Raises UserError if there is none."""
    from xfresearch.checkpoints import store

    steps = store.agreed_steps(workdir)
    if not steps:
        raise UserError(f"--all-steps is not allowed with {workdir}: it has no checkpoints")
    return steps


def evaluate(options, workdir) -> None:
    """Measures the held-out loss as `options` say, and prints it."""
    from xfresearch.checkpoints import manifest
    from xfresearch.data import coverage

    every = saved(workdir) if options.all_steps else []
    step = jobs.chosen(every, options.job) if options.job else options.step
    lm, mesh = held_out.open_model(options.workdir, step)
    data = held_out.read(lm, workdir, options)
    check_texts(lm, data, options)
    manifest.require_same_everywhere({"checkpoint": str(lm.step), "held-out data": data.digest})
    if distributed.first():
        print(f"{data.corpus} {data.split}: {data.description}", file=sys.stderr)
    results = evaluate_steps(lm, workdir, data, options, mesh)
    results[0] |= of_texts(lm, data, options)
    if options.job and len(results) < len(every) and distributed.first():
        print(f"{len(results)} of {len(every)} checkpoints have a result", file=sys.stderr)
    if not distributed.first():
        return
    print(table({"step": [str(result["step"]) for result in results], **figures(results)}))
    print(f"loss in nats per {data.target}; its standard error is over {results[0]['units']} {data.unit}")
    if note := coverage.note(results[0]):
        print(note)
    if options.all_steps:
        name = "bits_per_byte" if "bits_per_byte" in results[0] else "accuracy"
        print(f"{COLUMNS[name][0]}  {sparkline([result[name] for result in results])}")
    if len(results[-1].get("by_difficulty", {})) > 1:
        print(difficulty_table(results[-1]["by_difficulty"]))
    if options.per_document:
        print(document_table(results[-1]["documents"]))
    if options.json:
        measured = {"steps": results} if options.all_steps else results[0]
        write_json(options.json, {"workdir": options.workdir, **held_out.settings(data), **measured})


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.evaluate", description=__doc__, epilog=EPILOG)
    models = "a run's directory, one of its checkpoints, a Hugging Face folder, or a .bin file of llama2.c"
    made.add_argument("--workdir", metavar="DIR", required=True, help=models)
    add = made.add_argument
    add("--step", type=held_out.at_least(0), metavar="N", help="checkpoint to evaluate (default: the newest good one)")
    add("--all-steps", action="store_true", help="evaluate every checkpoint of the run and print the curve")
    jobs.add_flag(add, "checkpoint of --all-steps")
    held_out.add_flags(made)
    add("--per-document", action="store_true", help="also report the loss of every document")
    decoding = "also decode held-out sources greedily, and score the texts: exact_match, bleu, chrf (docs/objectives.md)"
    add("--decode", default="", metavar="METRIC,...", help=decoding)
    pseudo = "also mask each token alone, of --limit sequences (default 64), for a model that predicts masked tokens"
    add("--pseudo-perplexity", action="store_true", help=pseudo)
    add("--json", metavar="FILE", help="also write the results as JSON")
    task_commands.add_flags(made)
    distributed.add_flags(made)
    return made


def parse(arguments: list[str]):
    if any(argument.partition("=")[0] == "--compare" for argument in arguments):
        raise UserError("--compare is not a flag of this command: python -m xfresearch.compare DIR DIR compares runs")
    options = parser().parse_args(arguments)
    if options.job and not options.all_steps:
        raise UserError(f"--job={options.job} is not allowed without --all-steps: a job evaluates one of the checkpoints")
    task_commands.check(options)
    if options.decode:
        from xfresearch.evaluation import decoded

        options.decode = decoded.metrics_of(options.decode)
    for flag, given in (("--decode", options.decode), ("--pseudo-perplexity", options.pseudo_perplexity)):
        if given and (options.all_steps or options.tasks):
            other = "--all-steps" if options.all_steps else "--tasks"
            raise UserError(f"{flag} is not allowed with {other}: it measures one checkpoint on its own held-out data")
    if options.all_steps and options.step is not None:
        raise UserError(f"--step={options.step} is not allowed with --all-steps: give one of the two")
    return options


def evaluate_steps(lm, workdir, data, options, mesh=None) -> list[dict]:
    """The metrics of the model's own step, or of every good step of the run. Those of all steps are kept in the run's
    directory, and what is kept is not measured again; a job measures its step alone. A warning names each checkpoint that is
    damaged, or that the run has deleted meanwhile; it is skipped."""
    from xfresearch.checkpoints import store
    from xfresearch.checkpoints.validity import Unusable
    from xfresearch.evaluation import answers
    from xfresearch.evaluation.kept import Kept
    from xfresearch.evaluation.whole_rows import Rows
    from xfresearch.loading import loading

    scorer = held_out.Scorer(lm, data, options.batch_size, mesh)
    kept = Kept(workdir, data, options.per_document) if options.all_steps else None
    results = []
    for step in sorted({lm.step, *store.agreed_steps(workdir)}) if options.all_steps else [lm.step]:
        result = kept and kept.read(step)
        if result is None and (step == lm.step or not options.job):
            try:
                params = lm.params if step == lm.step else loading.read_params(workdir, lm.config, step, mesh)
            except Unusable as error:
                print(f"warning: {error}; skipped", file=sys.stderr)
                continue
            scores = scorer(params, f"step {step}")
            result = {"step": step, **metrics(data, scores, lm.tokenizer, options.per_document)}
            result |= answers.figures(lm.config, params, data, result, mesh) if isinstance(data, Rows) else {}
            if kept:
                kept.write(step, result)
        results += [result] if result else []
    return results


def check_texts(lm, data, options) -> None:
    """Raises UserError before anything is measured, if --decode or --pseudo-perplexity does not fit the objective."""
    from xfresearch.evaluation import decoded, pseudo

    if options.decode:
        decoded.check(lm.run)
    if options.pseudo_perplexity:
        pseudo.masked_sequences(data)


def of_texts(lm, data, options) -> dict:
    """The metrics of --decode and --pseudo-perplexity, {} without them."""
    from xfresearch.evaluation import decoded, losses, pseudo
    from xfresearch.runtime.terminal import bar

    results: dict = {}
    if options.decode:
        with bar(desc="decoding", unit="pairs", disable=None, leave=False) as progress:
            asked = (data.corpus, data.split, options.limit, options.batch_size)
            texts = decoded.decode(lm, *asked, progress=progress.update)
        results |= decoded.score(texts, options.decode)
    if options.pseudo_perplexity:
        count = options.limit or pseudo.COUNT
        scorer = losses.make_scorer(lm.config, lm.run.training.layers, lm.run.training.loss_rows)
        with bar(desc="masking", total=count, unit="seq", disable=None, leave=False) as progress:
            size = losses.batch_size(lm.run, options.batch_size)
            results |= pseudo.pseudo_perplexity(scorer, lm.params, data, size, count, progress.update)
    return results


def metrics(data, scores, tokenizer, per_document: bool) -> dict:
    """The metrics of one step from its `scores`, which are from held_out.Scorer."""
    from xfresearch.data import coverage
    from xfresearch.evaluation import losses, whole_rows

    if isinstance(data, whole_rows.Rows):
        return whole_rows.metrics(scores) | coverage.shares(data.meta)
    of_text = losses.text_figures(data, scores)
    if per_document:
        of_text["documents"] = losses.document_figures(data, scores, tokenizer)
    return of_text


def figures(results: list[dict]) -> dict[str, list[str]]:
    """{header: cells} of the table of `results`, a row for each."""
    known = {name: column for name, column in COLUMNS.items() if name in results[0]}
    return {title: [form.format(result[name]) for result in results] for name, (title, form) in known.items()}


def difficulty_table(by_difficulty: dict[str, dict]) -> str:
    """The accuracy of answers of each difficulty."""
    each = [*by_difficulty.values()]
    cells = {"difficulty": [*by_difficulty], **figures(each)}
    return table(cells | {"answers": [f"{accuracy['answers']:,}" for accuracy in each]})


def document_table(documents: list[dict], shown: int = 5) -> str:
    """The documents with the highest and the lowest bits per byte."""
    ranked = sorted((each for each in documents if each["bytes"]), key=lambda document: -document["bits_per_byte"])
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
    """The first value, one bar per value (higher for a higher value, none if it is not finite), and the last value."""
    bars = "▁▂▃▄▅▆▇█"
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    drawn = [bars[int((x - low) / (high - low or 1) * (len(bars) - 1))] if math.isfinite(x) else " " for x in values]
    return f"{values[0]:.4f} {''.join(drawn)} {values[-1]:.4f}"


if __name__ == "__main__":
    command.run(main)
