"""python -m xfresearch.evaluate --tasks: evaluates a model on tasks of lm_eval."""

import sys

from xfresearch.evaluation.held_out import at_least, open_model
from xfresearch.harness import tasks
from xfresearch.runtime import distributed, jobs
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_json
from xfresearch.runtime.tables import format_number, table, to_columns

LOSS_FLAGS = ("data", "split", "stride", "per_document")  # flags of the held-out loss only


def add_flags(parser) -> None:
    """Adds the flags of tasks."""
    add = parser.add_argument_group("tasks", "benchmarks of EleutherAI's lm_eval: docs/evaluation.md").add_argument
    add("--tasks", default="", metavar="NAME,...", help="run these tasks instead; --limit N: the first N items of each")
    add("--task-data", default="", metavar="DIR", help="read the tasks from JSON lines in this folder, without network")
    examples = "solved examples before each item (default: the task's own number)"
    add("--fewshot", type=at_least(0), metavar="N", help=examples)


def check(options) -> None:
    """Raises UserError if flags do not go together."""
    if not options.tasks:
        for name in ("task_data", "fewshot"):
            if getattr(options, name) not in ("", None):
                raise UserError(f"{_flag(name)} is not allowed without --tasks")
        return
    for name in LOSS_FLAGS:
        if getattr(options, name):
            raise UserError(f"{_flag(name)} is not allowed with --tasks: it applies to the held-out loss only")
    tasks.split_names(options.tasks, options.task_data)
    tasks.check_installed()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(options, steps: list[int | None]) -> None:
    """Evaluates checkpoints (None: the newest good one), or the one of a job, and prints the results as `options` say."""
    measured = [_measured(step, options) for step in ([jobs.chosen(steps, options.job)] if options.job else steps)]
    if options.json and distributed.first():
        outcomes = [without_values(model) for model in measured]
        write_json(options.json, {"steps": outcomes} if options.all_steps and not options.job else outcomes[0])


def _measured(step: int | None, options) -> dict:
    """The results of one checkpoint, which are printed."""
    from xfresearch.harness.measuring import measure

    lm, mesh = open_model(options.workdir, step)
    model = measure(options.workdir, lm, mesh, options)
    if distributed.first():
        print(f"{model['workdir']}, step {model['step']}; answers are saved in {model['kept_in']}", file=sys.stderr)
        print(table(columns(model["tasks"])))
    return model


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
    return to_columns(("task", "items", "shots", "metric", "value", "std. error"), rows)
