"""Runs tasks of lm_eval on a model and saves its answers."""

import io
import json
import math
import os
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path

import numpy as np

from xfresearch.checkpoints.digests import digests
from xfresearch.data.cache import cache_root, digest
from xfresearch.evaluation.losses import batch_size
from xfresearch.harness import tasks
from xfresearch.loading import loading
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.model_config import check_length, longest_sequence
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import files_in, finite, in_bucket, inside, read_object, write_text

NUMBER = int | float | np.integer | np.floating | np.bool_
RESAMPLES = 1000  # lm_eval bootstraps the standard errors of metrics that are not means
# lm_eval's own seeds: of the random choices of tasks, and of the choice of solved examples.
SEED = 0
EXAMPLES_SEED = 1234


def measure(path: str, lm: LanguageModel, mesh, options) -> dict:
    """The metrics of every task, and the values and questions that an item-by-item comparison needs."""
    if not lm.config.causal:
        raise UserError(f"--tasks is not allowed with {path}: the model is not causal, so text has no likelihood")
    if lm.tokenizer is None:
        raise UserError(f"--tasks is not allowed with {path}: the model has no tokenizer")
    length = max_length(lm, options.sequence_length)
    folder = answers_folder(path, lm, length)
    results = run_tasks(path, lm, mesh, length, folder, options)
    samples = {name: sorted(items, key=lambda item: item["doc_id"]) for name, items in results["samples"].items()}
    measured = {name.removeprefix(tasks.PREFIX): task_metrics(name, items, results) for name, items in samples.items()}
    if distributed.first():
        for (name, task), items in zip(measured.items(), samples.values(), strict=True):
            write_items(folder, name, task, items, options.limit)
            write_text(folder / f"{saved_name(name, task, options.limit)}.json", json.dumps(finite(task)) + "\n")
    settings = {"workdir": path, "step": lm.step, "sequence_length": length, "kept_in": str(folder)}
    return settings | {"task_data": options.task_data, "limit": options.limit, "tasks": measured}


def max_length(lm: LanguageModel, requested: int) -> int:
    """The longest input in tokens: `requested` if it is not 0, otherwise the longest that the model supports or, if it
    supports any, the length of the training sequences."""
    check_length(lm.config, requested)
    return requested or longest_sequence(lm.config) or lm.run.sequence_length


def answers_folder(path: str, lm: LanguageModel, length: int) -> Path:
    """The folder of a model's answers."""
    tokenizer = lm.tokenizer and lm.tokenizer.digest
    model = [digests({"params": lm.params}), asdict(lm.config), tokenizer, length]
    return answers_root(path, lm) / digest(model)


def answers_root(path: str, lm: LanguageModel) -> Path:
    """`harness` in the run's directory or, if `path` is no run on local disk, in the cache."""
    workdir, _ = loading.locate(path)
    local = (workdir / "checkpoints").exists() and not in_bucket(workdir)
    return Path(inside(workdir if local else cache_root(lm.run.data), "harness"))


def run_tasks(path: str, lm: LanguageModel, mesh, length: int, folder: Path, options) -> dict:
    """lm_eval's results. Its progress messages are discarded, and it starts no processes for standard errors."""
    # Some tasks shuffle their choices while they are loaded. With fixed seeds, every model gets the same order.
    random.seed(SEED)
    np.random.seed(EXAMPLES_SEED)
    names = tasks.split_names(options.tasks, options.task_data)
    cache = cache_root(lm.run.data) / "harness" / "task_data"
    loaded = tasks.load(names, options.task_data, cache, options.fewshot or 0)
    set_examples(loaded["tasks"], options.fewshot)
    os.environ["DISABLE_MULTIPROC"] = "1"
    from lm_eval import evaluator

    from xfresearch.harness.adapter import Adapter, PairedAdapter
    from xfresearch.harness.items import Items

    items = Items(inside(folder, "items.jsonl") if distributed.first() else None)
    items.update(distributed.shared(dict(items)))
    interface = PairedAdapter if lm.config.encoder else Adapter
    model = interface(lm, items, length, batch_size(lm.run, options.batch_size), mesh, path)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return evaluator.evaluate(lm=model, task_dict=loaded, limit=options.limit or None, bootstrap_iters=RESAMPLES)


def set_examples(loaded: dict, requested: int | None) -> None:
    """Sets the number of solved examples before each item: `requested`, or the task's own number if that is None. As in
    lm_eval, a task whose own number is 0 keeps it."""
    for name, task in loaded.items():
        own = task.get_config("num_fewshot")
        if requested and own == 0 and distributed.first():
            print(f"--fewshot={requested} does not apply to {name}: its task file sets 0", file=sys.stderr)
        task.set_config("num_fewshot", own or 0 if requested is None or own == 0 else requested)
        task.set_fewshot_seed(EXAMPLES_SEED)


def task_metrics(name: str, items: list[dict], results: dict) -> dict:
    """A task's metrics, a digest of its questions, and each item's values that are plain numbers."""
    values: dict = {}
    for item in items:
        for metric in item["metrics"]:
            if isinstance(item[metric], NUMBER):  # the value of one item for perplexity is its log-likelihood
                value = "log_likelihood" if metric == "perplexity" else metric
                values.setdefault(metric_name(value, item["filter"]), []).append(float(item[metric]))
    questions = digest([[item["doc_hash"], item["prompt_hash"], item["target_hash"]] for item in items])
    counts = {"items": results["n-samples"][name]["effective"], "fewshot": results["n-shot"][name]}
    lower = [metric for metric, higher in results["higher_is_better"][name].items() if higher is False]
    figures = {"metrics": figures_of(results["results"][name]), "lower_is_better": lower}
    return counts | figures | {"questions": questions, "values": values}


def figures_of(row: dict) -> dict:
    """{metric: value and standard error} from lm_eval's keys 'acc,none' and 'acc_stderr,none'."""
    figures = {}
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, NUMBER):
            error = row.get(f"{metric}_stderr,{kind}")
            error = float(error) if isinstance(error, NUMBER) and math.isfinite(error) else None
            figures[metric_name(metric, kind)] = {"value": float(value), "standard_error": error}
    return figures


def metric_name(metric: str, kind: str) -> str:
    """The metric's name with lm_eval's filter of answers, if there is one; most tasks have none."""
    return metric if kind == "none" else f"{metric},{kind}"


def write_items(folder: Path, name: str, task: dict, items: list[dict], limit: int) -> None:
    """Writes a JSON line for each item: its text, the model's answer and the values of the metrics."""
    lines = []
    for item in items:
        content = {key: item[key] for key in ("doc_id", "filter", "arguments", "target", "filtered_resps")}
        lines.append(json.dumps(content | {metric: item[metric] for metric in item["metrics"]}, default=_plain))
    write_text(folder / f"{saved_name(name, task, limit)}.jsonl", "\n".join(lines) + "\n")


def saved_name(name: str, task: dict, limit: int) -> str:
    """The name of a task's two files: .jsonl with the items, and .json with what `task_metrics` returns."""
    return f"{name}-{task['fewshot']}_shot{f'-first_{limit}' if limit else ''}"


def saved_tasks(path: str, lm: LanguageModel, requested_length: int) -> dict[str, dict]:
    """{saved name: what `task_metrics` returned} of every task that the model at `path` was evaluated on. Every process
    must call it; process 0 gets the tasks, and the others nothing."""
    if lm.tokenizer is None or not distributed.shared(answers_root(path, lm).exists()):
        return {}
    folder = answers_folder(path, lm, max_length(lm, requested_length))
    files = files_in(folder, pattern="*_shot*.json") if distributed.first() else []
    return {file.stem: read_object(file) for file in files}


def _plain(value):
    """Converts a value for JSON: a NumPy number to a Python number, anything else to a string."""
    return value.item() if isinstance(value, np.generic) else str(value)
