"""Runs tasks with lm_eval on a model of ours, and keeps what it answered."""

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

from xfresearch import distributed, loading
from xfresearch.checkpoints.store import fingerprints, in_bucket
from xfresearch.data.cache import cache_root, digest
from xfresearch.errors import UserError
from xfresearch.evaluation import batch_size, check_length
from xfresearch.files import write_text
from xfresearch.harness import tasks
from xfresearch.language_model import LanguageModel
from xfresearch.models.model_config import longest_sequence

NUMBER = int | float | np.integer | np.floating | np.bool_
RESAMPLES = 1000  # for standard errors of what is no mean, which lm_eval draws
SEED, EXAMPLES_SEED = 0, 1234  # lm_eval's own, of what tasks draw and of the choice of solved examples


def measure(path: str, lm: LanguageModel, mesh, options) -> dict:
    """The figures of every task, and what is needed to compare them item by item."""
    if not lm.config.causal:
        raise UserError(f"--tasks is not allowed with {path}: it reads both ways and gives no text a likelihood")
    if lm.tokenizer is None:
        raise UserError(f"--tasks is not allowed with {path}: it has no tokenizer")
    length = max_length(lm, options.sequence_length)
    folder = kept_in(path, lm, length)
    results = run_tasks(path, lm, mesh, length, folder, options)
    samples = {name: sorted(items, key=lambda item: item["doc_id"]) for name, items in results["samples"].items()}
    found = {name.removeprefix(tasks.PREFIX): task_of(name, items, results) for name, items in samples.items()}
    if distributed.first():
        for (name, task), items in zip(found.items(), samples.values(), strict=True):
            write_items(folder, name, task, items, options.limit)
    kept = {"workdir": path, "step": lm.step, "sequence_length": length, "kept_in": str(folder)}
    return kept | {"task_data": options.task_data, "limit": options.limit, "tasks": found}


def max_length(lm: LanguageModel, asked: int) -> int:
    """How many tokens the model reads at once: as its table of positions or its training says, unless `asked` is given."""
    check_length(lm.config, asked)
    return asked or longest_sequence(lm.config) or lm.run.sequence_length


def kept_in(path: str, lm: LanguageModel, length: int) -> Path:
    """Where a model's answers are kept: in its run's directory, or in the cache for a folder that is no run of this disk."""
    model = [fingerprints({"params": lm.params}), asdict(lm.config), lm.tokenizer.digest, length]
    workdir, _ = loading.locate(path)
    local = (workdir / "checkpoints").exists() and not in_bucket(workdir)
    return (Path(workdir) if local else cache_root(lm.run.data)) / "harness" / digest(model)


def run_tasks(path: str, lm: LanguageModel, mesh, length: int, folder: Path, options) -> dict:
    """lm_eval's results. What it says of its progress is not passed on, and it starts no processes for standard errors."""
    random.seed(SEED)  # some tasks put their choices in an order drawn as they are loaded: every model has the same
    np.random.seed(EXAMPLES_SEED)
    names = tasks.split_names(options.tasks, options.task_data)
    cache = cache_root(lm.run.data) / "harness" / "task_data"
    loaded = tasks.load(names, options.task_data, cache, options.fewshot or 0)
    set_examples(loaded["tasks"], options.fewshot)
    os.environ["DISABLE_MULTIPROC"] = "1"
    from lm_eval import evaluator

    from xfresearch.harness.adapter import Adapter
    from xfresearch.harness.items import Items

    items = Items(folder / "items.jsonl" if distributed.first() else None)
    items.update(distributed.shared(dict(items)))
    model = Adapter(lm, items, length, batch_size(lm.run, options.batch_size), mesh, path)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return evaluator.evaluate(lm=model, task_dict=loaded, limit=options.limit or None, bootstrap_iters=RESAMPLES)


def set_examples(loaded: dict, asked: int | None) -> None:
    """How many solved examples stand before an item: as `asked`, but none where a task says so, which is lm_eval's rule."""
    for name, task in loaded.items():
        own = task.get_config("num_fewshot")
        if asked and own == 0 and distributed.first():
            print(f"--fewshot={asked}: {name} keeps to 0, as its task file says", file=sys.stderr)
        task.set_config("num_fewshot", own or 0 if asked is None or own == 0 else asked)
        task.set_fewshot_seed(EXAMPLES_SEED)


def task_of(name: str, items: list[dict], results: dict) -> dict:
    """A task's figures, and of each item what was asked and the values that are plain numbers."""
    values = {}
    for item in items:
        for metric in item["metrics"]:
            if isinstance(item[metric], NUMBER):
                values.setdefault(metric_name(value_name(metric), item["filter"]), []).append(float(item[metric]))
    questions = digest([[item["doc_hash"], item["prompt_hash"], item["target_hash"]] for item in items])
    counts = {"items": results["n-samples"][name]["effective"], "fewshot": results["n-shot"][name]}
    lower = [metric for metric, higher in results["higher_is_better"][name].items() if higher is False]
    figures = {"metrics": figures_of(results["results"][name]), "lower_is_better": lower}
    return counts | figures | {"questions": questions, "values": values}


def figures_of(row: dict) -> dict:
    """{metric: value and standard error} of what lm_eval writes as 'acc,none' and 'acc_stderr,none'."""
    figures = {}
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, NUMBER):
            error = row.get(f"{metric}_stderr,{kind}")
            error = float(error) if isinstance(error, NUMBER) and math.isfinite(error) else None
            figures[metric_name(metric, kind)] = {"value": float(value), "standard_error": error}
    return figures


def metric_name(metric: str, kind: str) -> str:
    """lm_eval's filters of answers set metrics apart; most tasks have none."""
    return metric if kind == "none" else f"{metric},{kind}"


def value_name(metric: str) -> str:
    """An item has no perplexity, but a log-likelihood."""
    return "log_likelihood" if metric == "perplexity" else metric


def write_items(folder: Path, name: str, task: dict, items: list[dict], limit: int) -> None:
    """A line for each item: what its text was, what the model answered, and the values of the metrics."""
    lines = []
    for item in items:
        kept = {key: item[key] for key in ("doc_id", "filter", "arguments", "target", "filtered_resps")}
        lines.append(json.dumps(kept | {metric: item[metric] for metric in item["metrics"]}, default=_plain))
    part = f"-first_{limit}" if limit else ""
    write_text(folder / f"{name}-{task['fewshot']}_shot{part}.jsonl", "\n".join(lines) + "\n")


def _plain(value):
    """What JSON has no form for: a number of NumPy's as Python's, anything else that a task answers with as its text."""
    return value.item() if isinstance(value, np.generic) else str(value)
