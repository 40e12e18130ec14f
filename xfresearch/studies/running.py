"""One run of a study: trains with the loop of every run, measures, and writes result.json into the run's directory.

A run that was interrupted goes on at its checkpoint. A finished one has a result, and is not trained again unless its config
has changed, or the study measures more. Its checkpoints are removed, unless the study keeps them. Runs of other studies
count if their configs are the same.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from etils import epath

from xfresearch.config.comparing import fingerprint
from xfresearch.config.run import Config
from xfresearch.errors import Diverged, UserError
from xfresearch.files import exists, read_object, write_json
from xfresearch.language_model import LanguageModel
from xfresearch.studies import probes
from xfresearch.studies.cells import Trial
from xfresearch.studies.design import Study
from xfresearch.studies.matching import Matched
from xfresearch.training.metrics import read_metrics

RESULT_FILE = "result.json"  # of a run
RUNS_FILE = "runs.json"  # of a study: the results of all its runs


class Counted:
    """Counts the updates of a run in the progress of its study."""

    def __init__(self, update: Callable[[int], None]):
        self._update = update

    def update(self, step: int, loss: float, tokens: int) -> None:
        self._update(1)

    def close(self) -> None:
        pass


def config_of_trial(trial: Trial, config: Config) -> Config:
    """The config of a cell with the rate and the seed of a run. It saves at the end, and writes no TensorBoard files."""
    optimizer = replace(config.optimizer, learning_rate=trial.rate)
    log, checkpoint = replace(config.log, tensorboard=False), replace(config.checkpoint, every=config.steps, keep_best=False)
    return replace(config, seed=trial.seed, optimizer=optimizer, log=log, checkpoint=checkpoint)


class Store(NamedTuple):
    """The results of a study: its directory, and results that are known from runs.json files by their fingerprint."""

    folder: epath.Path
    known: Mapping[str, dict]

    def find(self, study: Study, trial: Trial, config: Config) -> dict | None:
        """The result of a run of the cell with this config; None if it has not finished, had another config, or measured
        less."""
        wanted, file = fingerprint(config_of_trial(trial, config)), self.folder / trial.folder / RESULT_FILE
        for found in (read_object(file) if exists(file) else {}, self.known.get(wanted, {})):
            measured = found.get("diverged") or set(study.probes) <= set(found.get("probes", ()))
            if found.get("fingerprint") == wanted and found.get("metric") == study.metric and measured:
                return found
        return None


def open_store(workdir, others: Sequence[str] = ()) -> Store:
    """The results in a study's directory, and in those of other studies. Raises UserError for another one without any."""
    folder, known = epath.Path(workdir), {}
    for path in others:
        if not exists(epath.Path(path) / RUNS_FILE):
            raise UserError(f"--reuse={path} is not allowed: it must be the directory of a study, which has {RUNS_FILE}")
        known |= _read_runs(epath.Path(path) / RUNS_FILE)
    return Store(folder, known | (_read_runs(folder / RUNS_FILE) if exists(folder / RUNS_FILE) else {}))


def _read_runs(file) -> dict[str, dict]:
    """{fingerprint: result} of a file of runs. Raises UserError if it has none."""
    runs = read_object(file).get("runs")
    if not isinstance(runs, dict):
        raise UserError(f"{file}: it must be the {RUNS_FILE} of a study, an object with 'runs'")
    return runs


def seconds(result: Mapping) -> float:
    """The time of a run: of all processes that trained it, and of measuring it."""
    return sum(value for name, value in result["seconds"].items() if name != "tokens")


def deciding(study: Study, found: dict) -> float:
    """The metric that decides, where less is better; NaN for a run that diverged."""
    value = found["evaluation"].get(study.metric)
    value = math.nan if value is None else float(value)
    return 1 - value if study.metric == "accuracy" else value


def _curve(folder, metric: str) -> list[tuple[int, float]]:
    """(update, metric) of each evaluation of a run."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row[metric]) for row in rows if row["kind"] == "evaluation" and row.get(metric) is not None]


def run_trial(study: Study, store: Store, trial: Trial, matched: Matched, count: Callable[[int], None]) -> dict:
    """Trains one run, unless it has a result, and returns the result. If it is told to stop, it saves, and the process
    ends as that of a training run does."""
    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.hardware import describe_machine, git_commit
    from xfresearch.training import loop
    from xfresearch.training.metrics import Clock
    from xfresearch.training.workdir import locked

    config = config_of_trial(trial, matched.config)
    folder = store.folder / trial.folder
    with locked(folder):
        if found := store.find(study, trial, matched.config):
            return found
        clock = Clock()
        tokenizer = None if trains_on_labels(config.data) else tokenizer_for(config.data)
        loop.setup_jax(config)
        found = {"fingerprint": fingerprint(config), "metric": study.metric, "evaluation": {}, "step": 0}
        spent = {"down": 0.0}  # while no process ran
        try:
            result = loop.train(config, folder, tokenizer, clock, progress=Counted(count))
        except Diverged as error:
            found["diverged"] = str(error)
        else:
            if result.stopped_by:
                sys.exit(128 + signal.Signals[result.stopped_by])
            found |= {"evaluation": result.evaluation, "step": result.step}
            found["curve"] = _curve(folder, study.metric)
            lm = LanguageModel(config.model, result.params, tokenizer, config, result.step)
            began = time.perf_counter()
            found["probes"] = probes.measure(lm, study.probes, folder, study.task_data)
            spent["probes"] = time.perf_counter() - began
        made = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "commit": git_commit()}
        found |= {"seconds": {**clock.state(), **spent}, "made": made}
        write_json(folder / RESULT_FILE, found)
        if not study.keep and (folder / "checkpoints").exists():
            (folder / "checkpoints").rmtree()
    return found
