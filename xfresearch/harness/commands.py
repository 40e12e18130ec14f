"""python -m xfresearch.evaluate --tasks: evaluates one run on tasks of lm_eval, or compares two runs."""

import math
import sys
from collections.abc import Callable

from xfresearch import distributed
from xfresearch.errors import UserError
from xfresearch.files import write_json
from xfresearch.harness import pairing, tasks
from xfresearch.tables import table

LOSS_FLAGS = ("data", "split", "stride", "per_document", "all_steps")  # flags of the held-out loss only


def add_flags(parser, natural) -> None:
    """Adds the flags of tasks. `natural` is the argparse type for integers of at least 0."""
    add = parser.add_argument_group("tasks", "benchmarks of EleutherAI's lm_eval: docs/evaluation.md").add_argument
    add("--tasks", default="", metavar="NAME,...", help="run these tasks instead of measuring the loss")
    add("--task-data", default="", metavar="DIR", help="read the tasks from JSON lines in this folder, without network")
    add(
        "--fewshot", type=natural, metavar="N", help="solved examples before each item (default: the task's own number)"
    )
    add("--compare", nargs=2, default=[], metavar="DIR", help="two runs to compare item by item, instead of --workdir")


def check(options) -> None:
    """Raises UserError if flags do not go together."""
    if not options.tasks:
        for name in ("task_data", "fewshot", "compare"):
            if getattr(options, name) not in ("", None, []):
                raise UserError(f"{_flag(name)} is not allowed without --tasks")
        return
    for name in LOSS_FLAGS:
        if getattr(options, name):
            raise UserError(f"{_flag(name)} is not allowed with --tasks: it applies to the held-out loss only")
    if options.compare and options.step is not None:
        hint = "give paths of checkpoints, for example runs/a/checkpoints/500"
        raise UserError(f"--step={options.step} is not allowed with --compare: {hint}")
    tasks.split_names(options.tasks, options.task_data)
    tasks.check_installed()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(options, open_model: Callable) -> None:
    """Evaluates and prints as `options` say. open_model(path, step) returns a model and its mesh."""
    from xfresearch.harness.measuring import measure

    paths = options.compare or [options.workdir]
    measured = [measure(path, *open_model(path, options.step), options) for path in paths]
    if not distributed.first():
        return
    for model in measured:
        print(f"{model['workdir']}, step {model['step']}; answers are saved in {model['kept_in']}", file=sys.stderr)
        print(table(columns(model["tasks"])))
    reports = [without_values(model) for model in measured]
    result = {"models": reports} if options.compare else reports[0]
    if options.compare:
        result["comparison"] = compare(*(model["tasks"] for model in measured))
        print(f"first: {paths[0]}, second: {paths[1]}")
        print(table(comparison_columns(result["comparison"])))
        print(*sentences(*paths, result["comparison"]), sep="\n")
    if options.json:
        write_json(options.json, result)


def without_values(model: dict) -> dict:
    """A model's results without the values of each item, which have their own file."""
    metrics = {
        name: {key: value for key, value in task.items() if key != "values"} for name, task in model["tasks"].items()
    }
    return model | {"tasks": metrics}


def columns(measured: dict) -> dict[str, list[str]]:
    """The columns of the table of one model's metrics."""
    rows = [
        (
            name,
            f"{task['items']:,}",
            str(task["fewshot"]),
            metric,
            format_number(figure["value"]),
            format_number(figure["standard_error"]),
        )
        for name, task in measured.items()
        for metric, figure in task["metrics"].items()
    ]
    return to_columns(("task", "items", "shots", "metric", "value", "+-"), rows)


def to_columns(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> dict[str, list[str]]:
    """{title: cells} of a table's rows."""
    return {title: [row[i] for row in rows] for i, title in enumerate(titles)}


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def compare(first: dict, second: dict) -> dict:
    """{task: {metric: paired comparison}} of two models' tasks."""
    comparison = {}
    for name, task in first.items():
        other = second[name]
        if task["questions"] != other["questions"]:
            raise UserError(f"--compare: {name} has different prompts or targets for the two models")
        pairs = {metric: (values, other["values"].get(metric, [])) for metric, values in task["values"].items()}
        comparison[name] = {
            metric: pairing.pair(*both) | {"lower_is_better": metric.partition(",")[0] in task["lower_is_better"]}
            for metric, both in pairs.items()
            if len(both[0]) == len(both[1]) and all(map(math.isfinite, both[0] + both[1]))
        }
    for metric in {metric for metrics in comparison.values() for metric in metrics}:
        tests = [metrics[metric] for metrics in comparison.values() if metric in metrics]
        for test, p in zip(tests, pairing.holm([test["p"] for test in tests]), strict=True):
            test["p_holm"] = p
    return comparison


def comparison_columns(comparison: dict) -> dict[str, list[str]]:
    rows = [
        (name, f"{f['items']:,}", metric, f"{f['first']:.4f}", f"{f['second']:.4f}", f"{f['difference']:+.4f}",
         "{:+.4f} to {:+.4f}".format(*f["interval"]), f"{f['first_higher']:,}", f"{f['second_higher']:,}",
         f"{f['p']:.2g}", f"{f['p_holm']:.2g}")
        for name, metrics in comparison.items() for metric, f in metrics.items()
    ]  # fmt: skip
    titles = ("task", "items", "metric", "first", "second", "difference", "95 % interval", "first higher",
              "second higher", "p", "p, Holm")  # fmt: skip
    return to_columns(titles, rows)


def sentences(first: str, second: str, comparison: dict) -> list[str]:
    """One sentence for each task about its accuracy or, without that, its first metric in alphabetical order."""
    lines = []
    for name, metrics in comparison.items():
        metric = "acc" if "acc" in metrics else min(metrics, default="")
        lines.append(
            pairing.sentence(first, second, name, metric, metrics[metric])
            if metrics
            else f"{name} is not compared: none of its metrics has a number for every item"
        )
    return lines
