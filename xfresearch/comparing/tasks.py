"""Compares models item by item on the tasks of lm_eval on which xfresearch.evaluate has saved their answers."""

import math

from xfresearch.comparing.pairing import MCNEMAR, correct, of_runs, pair


def compare(tasks: dict[str, dict[str, dict]], margin: float) -> tuple[dict, list[str]]:
    """Compares every run with the first one.

    `tasks` is {run: {task: what harness.measuring.saved_tasks gives}}. `margin` applies to metrics whose values are 0 or
    1. Returns {task: {metric: {run: paired comparison}}}, and a note on each task that some runs lack.
    """
    comparison: dict = {}
    notes = []
    for name in dict.fromkeys(name for saved in tasks.values() for name in saved):
        first, *others = (run for run in tasks if name in tasks[run])
        lacking = [run for run in tasks if name not in tasks[run]]
        notes += [f"{run} was not evaluated on {name}" for run in lacking]
        if next(iter(tasks)) in lacking:
            continue
        comparison[name] = {}
        for run in others:
            if tasks[run][name]["questions"] != tasks[first][name]["questions"]:
                notes.append(f"{name} has different prompts or targets for {first} and {run}")
                continue
            for metric, of_metric in _pairs(tasks[run][name], tasks[first][name]).items():
                comparison[name].setdefault(metric, {})[run] = of_metric
    _judge(comparison, margin)
    return {name: metrics for name, metrics in comparison.items() if metrics}, notes


def _pairs(task: dict, reference: dict) -> dict[str, dict]:
    """{metric: paired comparison} of the metrics that are a number for every item."""
    return {
        metric: pair(values, others) | {"lower_is_better": metric.partition(",")[0] in task["lower_is_better"]}
        for metric, values in task["values"].items()
        if (others := reference["values"].get(metric)) and len(values) == len(others) and _finite(values + others)
    }


def _finite(values: list) -> bool:
    """Whether all values are finite. JSON has None for one that was not."""
    return all(value is not None and math.isfinite(value) for value in values)


def _judge(comparison: dict, margin: float) -> None:
    """Adds the corrected p and the verdict to every comparison. A metric's tests are those on all tasks and runs."""
    for metric in {metric for metrics in comparison.values() for metric in metrics}:
        tests = [test for metrics in comparison.values() for test in metrics.get(metric, {}).values()]
        correct(tests)
        for test in tests:
            test["verdict"] = of_runs("task", test, margin if test["test"] == MCNEMAR else 0.0)
