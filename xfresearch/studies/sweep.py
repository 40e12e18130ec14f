"""A sweep: one config with several values of its options, and several seeds, as one table.

Each run has its own directory, with the result file of a run of a study: the same call goes on where it stopped, and trains
nothing again. Runs of one shape, such as those that differ in the seed or the learning rate, follow each other and share one
compiled program.
"""

import hashlib
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from etils import epath

from xfresearch.data.labels import predicts_next, trains_on_labels
from xfresearch.data.tokenizers import vocab_size
from xfresearch.options.comparing import fingerprint
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import Source, as_arguments
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside
from xfresearch.runtime.progress import stage
from xfresearch.runtime.run_rows import Rows
from xfresearch.runtime.terminal import filtered
from xfresearch.studies.measurement import RESULT_FILE, Counted, Wanted, read_result, seconds, train_and_measure
from xfresearch.training import pretrained, trackers
from xfresearch.training.callbacks import Callback
from xfresearch.training.hyperparameters import without_hyper
from xfresearch.training.workdir import locked

Grid = Mapping[str, Sequence[object]] | Sequence[Mapping[str, object]]
LONGEST = 120  # characters of the name of a directory


class Planned(NamedTuple):
    """One run of a sweep."""

    point: Mapping[str, object]  # the overrides
    config: Config
    folder: epath.Path

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.config, "bits_per_byte" if predicts_next(self.config.data) else "accuracy")

    @property
    def result(self) -> dict[str, Any]:
        """The result of the run; {} if it has none yet."""
        file = inside(self.folder, RESULT_FILE)
        result = read_result(file) if exists(file) else {}
        return result if self.wanted.is_in(result, fingerprint(self.config)) else {}


def sweep(
    config: Source,
    grid: Grid,
    *,
    workdir: str,
    seeds: int | Sequence[int] = 1,
    callbacks: Sequence[Callback] = (),
) -> Rows:
    """Trains a config with every point of `grid` and every seed, and returns a row for each run that has ended.

    config: as for `xf.train`. grid: {dotted key: values}, of which every combination is a point, or a list of points,
    {dotted key: value} each; [{}] is the config as it is. seeds: their number, from 0 on, or a list. workdir: directory of
    the sweep; a run is in workdir/POINT/seed-S. callbacks: see every run.

    A row has the overrides, the seed, the held-out `loss` (and `bits_per_byte` or `accuracy`), `step`, `seconds`,
    `parameters`, `workdir`, and the reason under `diverged` if the run failed. Ctrl-C saves the run that trains, and returns
    the rows so far; the same call goes on there. Raises UserError for a mistake in any point, before anything is trained.
    """
    with filtered():
        runs = _planned(config, grid, workdir, range(seeds) if isinstance(seeds, int) else seeds)
        stopped_by = _train_all(runs, callbacks)
    if stopped_by == "SIGTERM":
        signal.raise_signal(signal.SIGTERM)
    return Rows(_row(run, run.result) for run in runs if run.result)


def _train_all(runs: Sequence[Planned], callbacks: Sequence[Callback]) -> str:
    """Trains the runs that have no result, those of one shape after one another. Returns the signal that ended it, or ''."""
    shapes = [without_hyper(run.config) for run in runs]
    ordered = [run for shape in dict.fromkeys(shapes) for run, own in zip(runs, shapes, strict=True) if own == shape]
    with stage("sweep", sum(run.config.steps for run in runs), "updates") as progress:
        for run in ordered:
            if run.result:
                progress.update(run.config.steps)
                continue
            watching = [Counted(progress.update), *trackers.chosen(run.config), *callbacks]
            with locked(run.folder):
                result, stopped_by = train_and_measure(run.folder, run.config, run.wanted, watching)
            if stopped_by in signal.Signals.__members__:
                print(f"{stopped_by}: saved {run.folder}; the same call goes on there", file=sys.stderr, flush=True)
                return stopped_by
            print(f"{run.folder}: {_in_words(run, result)}", file=sys.stderr, flush=True)
    return ""


def _planned(config: Source, grid: Grid, workdir: str, seeds: Sequence[int]) -> list[Planned]:
    """All runs, in the order of the points. Raises UserError for a mistake in any of them."""
    if not workdir:
        raise UserError("workdir='' is not allowed: it must be the directory of the sweep")
    runs = []
    for point in _points(grid):
        if "seed" in point:
            raise UserError("grid: 'seed' is not allowed: the argument seeds has the seeds")
        for seed in seeds:
            parsed = pretrained.parse(as_arguments(config, {**point, "seed": seed}))
            if not trains_on_labels(parsed.data):
                parsed = with_vocabulary(parsed, vocab_size(parsed.data))
            runs.append(Planned(point, parsed, epath.Path(workdir).expanduser() / _name(point) / f"seed-{seed}"))
    if not runs:
        raise UserError("a sweep without a point or a seed is not allowed: it must have one run or more")
    return runs


def _points(grid: Grid) -> Iterator[Mapping[str, object]]:
    if not isinstance(grid, Mapping):
        yield from grid
        return
    if not grid:
        raise UserError("grid={} is not allowed: it must have a key and its values; [{}] trains the config as it is")
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UserError(f"grid: {key}={values!r} is not allowed: it must be a list of values")
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _name(point: Mapping[str, object]) -> str:
    """The name of a point's directory: 'model.width=32,steps=100'. One that is long or has other characters than a name of a
    file may have ends with a digest."""
    text = ",".join(f"{key}={value}" for key, value in point.items()) or "config"
    name = re.sub(r"[^A-Za-z0-9_.=,+-]", "_", text)[:LONGEST]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _row(run: Planned, result: Mapping[str, Any]) -> dict[str, object]:
    figures = {name: result["evaluation"].get(name) for name in dict.fromkeys(["loss", run.wanted.metric])}
    own = {"step": result.get("step", 0), "seconds": seconds(result), "diverged": result.get("diverged")}
    parameters = costs(run.config.model, run.config.sequence_length).parameters
    return {**run.point, "seed": run.config.seed, **figures, **own, "parameters": parameters, "workdir": str(run.folder)}


def _in_words(run: Planned, result: Mapping[str, Any]) -> str:
    if "diverged" in result:
        return f"diverged: {result['diverged']}"
    name = run.wanted.metric if run.wanted.metric in result["evaluation"] else "loss"  # of a text that does not come back
    return f"{name.replace('_', ' ')} {result['evaluation'][name]:.4f}, {seconds(result):.0f} s"
