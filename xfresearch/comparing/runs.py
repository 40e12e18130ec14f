"""A run without its parameters: config, costs and curves. The run need not be finished."""

from typing import NamedTuple

import numpy as np

from xfresearch.data.tokenizers import has_tokenizer, load_tokenizer
from xfresearch.loading import loading
from xfresearch.options.fields import leaves
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.runtime.files import inside
from xfresearch.training.metrics import read_metrics

AXES = {"step": "step", "tokens": "tokens seen", "flops": "FLOPs of training", "seconds": "seconds of training"}
LAST_ROWS = 20  # the rows whose mean is the final training loss: a single batch is noisy


class ComparedRun(NamedTuple):
    """A run, or a model without one: then it has no rows."""

    path: str
    config: Config
    rows: list[dict]  # of metrics.jsonl
    tokenizer: str  # its digest; '' without one
    step: int | None = None  # of the parameters that were measured


def has_metrics(path: str) -> bool:
    return (loading.locate(path)[0] / "metrics.jsonl").exists()


def read(path: str, measured=None) -> ComparedRun:
    """Reads the run at `path`. Config and tokenizer are those of the model that was `measured` (held_out.Measured). By
    default, they are read from the run's directory."""
    workdir, _ = loading.locate(path)
    rows = read_metrics(inside(workdir, "metrics.jsonl")) if has_metrics(path) else []
    if measured:
        return ComparedRun(path, measured.config, rows, measured.tokenizer, measured.step)
    folder = inside(workdir, "tokenizer")
    digest = load_tokenizer(folder).digest if has_tokenizer(folder) else ""
    return ComparedRun(path, loading.run_config(path), rows, digest)


def options(run: ComparedRun) -> dict:
    """{path: leaf} of the options of a run, without paths and thread counts of a machine."""
    return {leaf.path: leaf for leaf in leaves(run.config) if leaf.decides != "machine"}


def differences(runs: list[ComparedRun]) -> dict[str, dict]:
    """{option: {path of each run that has it: its value}} of the options that differ, without paths and thread counts
    of a machine.

    An option that not all runs have, such as one of another kind of layer, differs if a run changes its default. Only
    the options of the model are those of a model without a run.
    """
    different = {}
    of_runs = {run.path: options(run) for run in runs}
    for name in sorted(set().union(*of_runs.values())):
        asked = [run for run in runs if run.rows or name.startswith("model.")]
        owners = {run.path: of_runs[run.path][name] for run in asked if name in of_runs[run.path]}
        if len(owners) == len(asked):
            differs = len({repr(leaf.value) for leaf in owners.values()}) > 1
        else:
            differs = any(leaf.value != leaf.default for leaf in owners.values())
        if differs:
            different[name] = {path: leaf.value for path, leaf in owners.items()}
    return different


def summary(run: ComparedRun, measure: str) -> dict:
    """Parameters, forward FLOPs per token, and the steps, tokens, seconds and loss of the training so far (None if
    unknown)."""
    own = costs(run.config.model, run.config.sequence_length)
    losses = curve(run, "train", measure, "step")[-LAST_ROWS:, 1]
    ends = {axis: _last(_positions(run, axis)) for axis in ("step", "tokens", "seconds")}
    return {
        "parameters": own.parameters,
        "flops_per_token": own.flops_per_token,
        "steps": ends["step"],
        "tokens": ends["tokens"],
        "seconds": ends["seconds"],
        "training_loss": float(losses.mean()) if len(losses) else None,
    }


def _last(positions: dict[int, float]) -> float | None:
    return list(positions.values())[-1] if positions else None


def curve(run: ComparedRun, kind: str, measure: str, axis: str) -> np.ndarray:
    """[points, 2]: the value of `axis` and the loss of the rows of `kind` ('train' or 'evaluation'); empty without
    any."""
    at = _positions(run, axis)
    rows = [row for row in run.rows if row["kind"] == kind and row.get(measure) is not None and row["step"] in at]
    return np.array([(at[row["step"]], row[measure]) for row in rows], float).reshape(-1, 2)


def _positions(run: ComparedRun, axis: str) -> dict[int, float]:
    """{step: value of `axis`} of every step with a row. An evaluation has the seconds of the training row before it."""
    tokens = run.config.batch_size * run.config.sequence_length  # per update
    per_token = costs(run.config.model, run.config.sequence_length).training_flops_per_token
    scale = {"step": 1, "tokens": tokens, "flops": tokens * per_token}
    if axis != "seconds":
        return {row["step"]: row["step"] * scale[axis] for row in run.rows}
    positions = {}
    seconds = None
    for row in run.rows:
        seconds = row.get("seconds", seconds)
        if seconds is not None:
            positions[row["step"]] = seconds
    return positions
