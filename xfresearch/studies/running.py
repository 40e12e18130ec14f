"""One run of a study: trains with the loop of every run, measures, and writes result.json into the run's directory.

A run that was interrupted goes on at its checkpoint. A finished one has a result, and is not trained again unless its config
has changed. Its checkpoints are removed, unless the study keeps them.
"""

import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from etils import epath

from xfresearch.config.comparing import fingerprint
from xfresearch.config.run import Config
from xfresearch.errors import Diverged
from xfresearch.files import exists, read_object, write_json
from xfresearch.language_model import LanguageModel
from xfresearch.studies import probes
from xfresearch.studies.cells import Trial
from xfresearch.studies.design import Study
from xfresearch.studies.matching import Matched
from xfresearch.training.metrics import read_metrics

RESULT_FILE = "result.json"


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


def read_result(workdir, trial: Trial, config: Config) -> dict | None:
    """The result of a run of this config; None if it has not finished, or had another config."""
    file = epath.Path(workdir) / trial.folder / RESULT_FILE
    if not exists(file):
        return None
    found = read_object(file)
    return found if found.get("fingerprint") == fingerprint(config_of_trial(trial, config)) else None


def deciding(study: Study, found: dict) -> float:
    """The metric that decides, where less is better; NaN for a run that diverged."""
    value = found["evaluation"].get(study.metric)
    value = math.nan if value is None else float(value)
    return 1 - value if study.metric == "accuracy" else value


def _curve(folder, metric: str) -> list[tuple[int, float]]:
    """(update, metric) of each evaluation of a run."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row[metric]) for row in rows if row["kind"] == "evaluation" and row.get(metric) is not None]


def run_trial(study: Study, workdir, trial: Trial, matched: Matched, count: Callable[[int], None]) -> dict:
    """Trains one run, unless it has a result, and returns the result. If it is told to stop, it saves, and the process
    ends as that of a training run does."""
    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.training import loop
    from xfresearch.training.metrics import Clock
    from xfresearch.training.workdir import locked

    config = config_of_trial(trial, matched.config)
    folder = epath.Path(workdir) / trial.folder
    with locked(folder):
        found = read_result(workdir, trial, matched.config)
        if found:
            return found
        clock, began = Clock(), time.time()
        tokenizer = None if trains_on_labels(config.data) else tokenizer_for(config.data)
        loop.setup_jax(config)
        found = {"fingerprint": fingerprint(config), "evaluation": {}, "step": 0}
        try:
            result = loop.train(config, folder, tokenizer, clock, progress=Counted(count))
        except Diverged as error:
            found["diverged"] = str(error)
        else:
            if result.stopped_by:
                sys.exit(128 + signal.Signals[result.stopped_by])
            found |= {"evaluation": result.evaluation, "step": result.step, "time": result.clock.shares()}
            found["curve"] = _curve(folder, study.metric)
            lm = LanguageModel(config.model, result.params, tokenizer, config, result.step)
            found["probes"] = probes.measure(lm, study.probes)
        found |= {"wall_seconds": time.time() - began}
        write_json(folder / RESULT_FILE, found)
        if not study.keep and (folder / "checkpoints").exists():
            (folder / "checkpoints").rmtree()
    return found
