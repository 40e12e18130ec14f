"""python -m xfresearch.evaluate --tasks: tasks of lm_eval, of one run or of two side by side."""

import math
import sys
from collections.abc import Callable

from xfresearch import distributed
from xfresearch.errors import UserError
from xfresearch.files import write_json
from xfresearch.harness import pairing, tasks
from xfresearch.tables import table

OTHERS = ("data", "split", "stride", "per_document", "all_steps")  # flags of the loss that mean nothing for tasks


def add_flags(parser, natural) -> None:
    """Flags of the tasks; `natural` is the type of whole numbers from 0 on."""
    add = parser.add_argument_group("tasks", "benchmarks of EleutherAI's lm_eval: docs/evaluation.md").add_argument
    add("--tasks", default="", metavar="NAME,...", help="run these tasks instead of measuring the loss")
    add("--task-data", default="", metavar="DIR", help="folder of JSON lines that the tasks read, with no network")
    add(
        "--fewshot", type=natural, metavar="N", help="solved examples before each item (default: the task's own number)"
    )
    add("--compare", nargs=2, default=[], metavar="DIR", help="two runs to compare item by item, instead of --workdir")


def check(options) -> None:
    """UserError for flags that do not go together."""
    if not options.tasks:
        for name in ("task_data", "fewshot", "compare"):
            if getattr(options, name) not in ("", None, []):
                raise UserError(f"{_flag(name)} is not allowed without --tasks")
        return
    for name in OTHERS:
        if getattr(options, name):
            raise UserError(f"{_flag(name)} is not allowed with --tasks: it belongs to the loss")
    if options.compare and options.step is not None:
        raise UserError(
            f"--step={options.step} is not allowed with --compare: name checkpoints, runs/a/checkpoints/500"
        )
    tasks.split_names(options.tasks, options.task_data)
    tasks.check_installed()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(options, open_model: Callable) -> None:
    """Evaluates and prints what `options` ask for; open_model(path, step) is the model and the mesh that it lies on."""
    from xfresearch.harness.measuring import measure

    paths = options.compare or [options.workdir]
    measured = [measure(path, *open_model(path, options.step), options) for path in paths]
    if not distributed.first():
        return
    for found in measured:
        print(f"{found['workdir']}, step {found['step']}; answers are kept in {found['kept_in']}", file=sys.stderr)
        print(table(columns(found["tasks"])))
    result = {"models": [reported(found) for found in measured]} if options.compare else reported(measured[0])
    if options.compare:
        result["comparison"] = compare(*(found["tasks"] for found in measured))
        print(f"first: {paths[0]}, second: {paths[1]}")
        print(table(comparison_columns(result["comparison"])))
        print(*sentences(*paths, result["comparison"]), sep="\n")
    if options.json:
        write_json(options.json, result)


def reported(found: dict) -> dict:
    """Without the values of each item, which are kept in a file of their own."""
    without = {
        name: {key: value for key, value in task.items() if key != "values"} for name, task in found["tasks"].items()
    }
    return found | {"tasks": without}


def columns(measured: dict) -> dict[str, list[str]]:
    """Of the table of one model's figures."""
    rows = [
        (
            name,
            f"{task['items']:,}",
            str(task["fewshot"]),
            metric,
            short(figure["value"]),
            short(figure["standard_error"]),
        )
        for name, task in measured.items()
        for metric, figure in task["metrics"].items()
    ]
    return turned(("task", "items", "shots", "metric", "value", "+-"), rows)


def turned(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> dict[str, list[str]]:
    """Rows as columns by their titles."""
    return {title: [row[i] for row in rows] for i, title in enumerate(titles)}


def short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def compare(first: dict, second: dict) -> dict:
    """{task: {metric: figures of the paired comparison}} of two models' tasks."""
    found = {}
    for name, task in first.items():
        other = second[name]
        if task["questions"] != other["questions"]:
            raise UserError(f"--compare: {name} asked the two models different questions")
        pairs = {metric: (values, other["values"].get(metric, [])) for metric, values in task["values"].items()}
        found[name] = {
            metric: pairing.pair(*both) | {"lower_is_better": metric.partition(",")[0] in task["lower_is_better"]}
            for metric, both in pairs.items()
            if len(both[0]) == len(both[1]) and all(map(math.isfinite, both[0] + both[1]))
        }
    for metric in {metric for metrics in found.values() for metric in metrics}:
        together = [metrics[metric] for metrics in found.values() if metric in metrics]
        for figures, p in zip(together, pairing.holm([figures["p"] for figures in together]), strict=True):
            figures["p_holm"] = p
    return found


def comparison_columns(comparison: dict) -> dict[str, list[str]]:
    rows = [
        (name, f"{f['items']:,}", metric, f"{f['first']:.4f}", f"{f['second']:.4f}", f"{f['difference']:+.4f}",
         "{:+.4f} to {:+.4f}".format(*f["interval"]), f"{f['first_higher']:,}", f"{f['second_higher']:,}",
         f"{f['p']:.2g}", f"{f['p_holm']:.2g}")
        for name, metrics in comparison.items() for metric, f in metrics.items()
    ]  # fmt: skip
    titles = ("task", "items", "metric", "first", "second", "difference", "95 % interval", "first higher",
              "second higher", "p", "p, Holm")  # fmt: skip
    return turned(titles, rows)


def sentences(first: str, second: str, comparison: dict) -> list[str]:
    """One of each task, about its accuracy, or its first metric where it has none."""
    said = []
    for name, metrics in comparison.items():
        metric = "acc" if "acc" in metrics else min(metrics, default="")
        said.append(
            pairing.sentence(first, second, name, metric, metrics[metric])
            if metrics
            else f"{name} is not compared: no metric of it has a number for each item"
        )
    return said
