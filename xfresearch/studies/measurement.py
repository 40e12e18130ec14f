"""The measurement of one run, of a study or a sweep: trains it with the loop of every run, measures it, and writes
result.json into its directory. Also what a model would have that knows frequencies alone.

A run that was interrupted goes on at its checkpoint. A finished run has a result. Its checkpoints are removed, unless the
study keeps them: if the study later measures more, a run without checkpoints is trained again. Runs of other studies count
if their configs are the same. A directory with an unfinished run of another config is left alone: the design has changed.

The metric is measured after training, on evaluation.final_sequences sequences. The evaluations in training, and so all
points of the curve, are of evaluation.sequences.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xfresearch.checkpoints import manifest
from xfresearch.checkpoints.store import steps as saved_steps
from xfresearch.data.coverage import shares, words
from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import trains_on_labels
from xfresearch.data.pipeline import evaluation_batches, prepare
from xfresearch.data.tokenizers import tokenizer_for
from xfresearch.evaluation.losses import summary
from xfresearch.loading.language_model import LanguageModel
from xfresearch.options.comparing import RESULT, differences, fingerprint
from xfresearch.run_config.config import Config
from xfresearch.runtime import hardware
from xfresearch.runtime.errors import Diverged, UserError, require
from xfresearch.runtime.files import exists, inside, read_object, write_json
from xfresearch.runtime.schema import ANY, Maybe, check
from xfresearch.studies import probes
from xfresearch.studies.allocation import Trial
from xfresearch.studies.design import Study
from xfresearch.training.callbacks import Callback
from xfresearch.training.metrics import Clock, read_metrics
from xfresearch.training.workdir import saved_config

BLOCKS = 64  # of neighbouring held-out sequences, over which the sampling error of the metric is taken
SAVED_EVERY = 60.0  # seconds: a run of less than a minute saves only at its end
# The result of a run, in both files. A run that diverged has only some of these keys.
MADE = {"date": str, "machine": {"cpu": str, "cores": int, "devices": str}, "commit": str, "versions": {ANY: str}}
MADE |= {"together": Maybe([str])}  # the other runs with which it shared a program (trials.py)
OF_RUN = {"fingerprint": str, "metric": str, "evaluation": {ANY: Maybe(float)}, "seconds": {ANY: float}, "made": MADE}
OF_RUN |= {"curve": Maybe([[float]]), "data": Maybe({ANY: str}), "diverged": Maybe(str), "held_out": Maybe(list)}
OF_RUN |= {"blocks": Maybe({"values": [float], "sizes": [float]}), "probes": Maybe({ANY: Maybe(float)})}
RATIOS = {"bits_per_byte": ("nll", "bytes"), "loss": ("nll", "tokens"), "accuracy": ("correct", "tokens")}
ROWS, COUNTED = 256, 16384  # sequences whose tokens are counted: at a time, and of each training corpus
RESULT_FILE = "result.json"  # of a run
RUNS_FILE = "runs.json"  # of a study: the results of all its runs
SHARED_FILE = "together.json"  # of a run that has shared a program: with which runs, until it has a result


class Counted(Callback):
    """Counts the updates of a run in the progress of its study."""

    def __init__(self, update: Callable[[int], None]):
        self._update, self._at = update, 0

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self._update(step - self._at)  # the first one of a run that resumes counts those before it
        self._at = step


def tokenizer_of(config: Config):
    """The tokenizer of a run; None for a data set with labels."""
    return None if trains_on_labels(config.data) else tokenizer_for(config.data)


def config_of_trial(trial: Trial, config: Config) -> Config:
    """The config of a cell with the rate of a run, and its seed added to that of the cell. It saves once a minute at most,
    keeps no best checkpoint, has no tracker and no figures of layers, and its evaluations all have the same text."""
    apart = max(config.checkpoint.seconds, SAVED_EVERY)
    return replace(
        config,
        seed=config.seed + trial.seed,
        optimizer=replace(config.optimizer, learning_rate=trial.rate),
        log=replace(config.log, tracker="jsonl", panel=0),
        checkpoint=replace(config.checkpoint, seconds=apart, keep_best=False),
        evaluation=replace(config.evaluation, final_sequences=config.evaluation.sequences),
    )


def blocks(sums: Mapping[str, np.ndarray], metric: str) -> dict[str, list]:
    """The metric in blocks of the held-out data, in their order: sum(values) / sum(sizes) is the metric.

    sums: arrays [U] over the held-out sequences, as evaluation.sums_of_batches returns them. Rows that only fill the last
    batch, whose number depends on the devices, are left out: blocks are the same text on every machine.
    """
    value, size = RATIOS[metric]
    size = "answers" if metric == "accuracy" and "answers" in sums else size
    real_U = np.asarray(sums["tokens"]) > 0
    values_U, sizes_U = (np.asarray(sums[name], np.float64)[real_U] for name in (value, size))
    values_U = values_U / math.log(2) if metric == "bits_per_byte" else values_U
    parts = min(BLOCKS, len(values_U))
    values_B, sizes_B = ([part.sum() for part in np.array_split(each_U, parts)] for each_U in (values_U, sizes_U))
    sizes = [int(size) if size.is_integer() else round(float(size), 3) for size in sizes_B]
    return {"values": [round(float(value), 3) for value in values_B], "sizes": sizes}


def _held_out(config: Config) -> list:
    """The options that decide the held-out text of a run: the split, the numbers of sequences, and how often it is read."""
    each = config.evaluation
    return [each.split, each.final_sequences, each.sequences, each.every]


class Wanted(NamedTuple):
    """The measures of a run after training."""

    config: Config  # whose evaluation says on what
    metric: str
    probes: tuple[str, ...] = ()
    task_data: str = ""

    def is_in(self, result: Mapping, wanted: str) -> bool:
        """Whether a result is that of the run with the fingerprint `wanted`, on the same text, and has all of it."""
        measured = set(self.probes) <= set(result.get("probes", ())) and result.get("held_out") == _held_out(self.config)
        same = result.get("fingerprint") == wanted and result.get("metric") == self.metric
        return same and (measured or bool(result.get("diverged")))


def read_runs(folder) -> dict[str, dict]:
    """{fingerprint: result} of the runs that a study's directory keeps. Raises UserError if the file has none."""
    file = inside(folder, RUNS_FILE)
    if not exists(file):
        return {}
    return check(read_object(file), {"runs": {ANY: OF_RUN}}, file)["runs"]


def read_result(file) -> dict:
    """The result of a run. Raises UserError for a file that is damaged."""
    return check(read_object(file), OF_RUN, file)


def seconds(result: Mapping) -> float:
    """The time of a run: of all processes that trained it, and of measuring it."""
    return sum(value for name, value in result["seconds"].items() if name != "tokens")


def less_is_better(metric: str, value: float | None) -> float:
    """A value of the metric, such that less is better: errors for the accuracy. NaN for None."""
    value = math.nan if value is None else float(value)
    return 1 - value if metric == "accuracy" else value


def deciding(study: Study, result: dict) -> float:
    """The metric that decides, where less is better; NaN for a run that diverged."""
    return less_is_better(study.metric, result["evaluation"].get(study.metric))


def _curve(folder, metric: str) -> list[tuple[int, float]]:
    """(update, metric) of each evaluation of a run."""
    rows = read_metrics(inside(folder, "metrics.jsonl"))
    return [(row["step"], row[metric]) for row in rows if row["kind"] == "evaluation" and row.get(metric) is not None]


def require_same_config(folder, config: Config) -> None:
    """Raises UserError if the directory has a run with other options that decide its result."""
    before = saved_config(folder)
    changed = differences(before, config, deciding=RESULT) if before else []
    if changed:
        raise UserError(
            f"{folder} has a run of another config ({'; '.join(changed)}): give the arm or the size another name, use a new "
            "directory for the study, or remove this one, and the run begins again"
        )


@contextmanager
def _timed(spent: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    spent[name] = time.perf_counter() - began


def _made(together: Sequence[str]) -> dict:
    """When, where, with what and together with which runs a run was made."""
    made = {"date": time.strftime("%Y-%m-%d"), "machine": hardware.describe_machine(), "commit": hardware.git_commit()}
    return made | {"versions": hardware.versions()} | ({"together": list(together)} if together else {})


def shared_with(folder, now: Sequence[str] = ()) -> list[str]:
    """The runs with which a run has shared a program since it began, and shares it `now`, which its directory remembers."""
    file = inside(folder, SHARED_FILE)
    before = check(read_object(file), {"runs": [str]}, file)["runs"] if exists(file) and saved_steps(folder) else []
    if now or exists(file):
        write_json(file, {"runs": sorted({*before, *now})})
    return sorted({*before, *now})


def train_and_measure(folder, config: Config, wanted: Wanted, callbacks: Sequence[Callback]) -> tuple[dict, str]:
    """Locks the directory, trains the run, measures it and writes its result. Returns the result ({} if the run was stopped
    before), and the signal or callback that stopped the run, or ''. Raises UserError if the directory has a run of another
    config, or an unfinished run with other data, code or settings."""
    from xfresearch.training.loop import setup_jax

    require_same_config(folder, config)
    before = result_of_kept(folder, config.steps)
    clock, shared = Clock(), shared_with(folder)
    setup_jax(config)
    trained: Any
    try:
        trained = _trained(config, folder, tokenizer_of(config), clock, callbacks, before)
    except Diverged as error:
        trained = error
    result = measured(folder, config, wanted, trained, clock, shared, before.get("made"))
    return result, getattr(trained, "stopped_by", "")


def measured(folder, config: Config, wanted: Wanted, trained, clock, together: Sequence[str], made=None) -> dict:
    """Measures a run that was trained, writes its result and returns it; {} for one that a signal has stopped before.

    trained: its loop.Result, or Diverged. clock: of its training. together: the runs with which it shared a program. made:
    where it was made, if it was trained before.
    """
    outcome = {"fingerprint": fingerprint(config), "metric": wanted.metric, "evaluation": {}, "step": 0}
    spent = {"metric": 0.0, "probes": 0.0}
    if isinstance(trained, Diverged):
        outcome["diverged"] = str(trained)
    elif trained.stopped_by in signal.Signals.__members__ and not trained.finished:
        return {}
    else:
        with _timed(spent, "metric"):
            sums = trained.held_out(wanted.config.evaluation.final_sequences)
        outcome |= {"evaluation": summary(sums), "blocks": blocks(sums, wanted.metric), "step": trained.step}
        outcome |= {"held_out": _held_out(wanted.config), "curve": _curve(folder, wanted.metric)}
        outcome["data"] = manifest.of_data(trained.manifest)
        lm = LanguageModel(config.model, trained.params, tokenizer_of(config), config, trained.step)
        with _timed(spent, "probes"):
            outcome["probes"] = probes.measure(lm, wanted.probes, folder, wanted.task_data)
    outcome |= {"seconds": {**clock.state(), **spent}, "made": made or _made(together)}
    write_json(folder / RESULT_FILE, outcome)
    return outcome


def result_of_kept(folder, steps: int) -> dict:
    """The result of a run whose last checkpoint was kept, so that it is only measured again; {} for any other run."""
    kept = exists(folder / RESULT_FILE) and steps in saved_steps(folder)
    return read_result(inside(folder, RESULT_FILE)) if kept else {}


def _trained(config: Config, folder, tokenizer, clock, callbacks: Sequence[Callback], before: Mapping):
    """The training.loop.Result of a run. One that has a result, `before`, is only measured again: by any commit, because
    no update depends on it, but on the same data."""
    from xfresearch.training import loop

    with same_manifest():
        result = loop.train(config, folder, tokenizer, clock, fork=bool(before), callbacks=callbacks)
    data = manifest.of_data(result.manifest)
    changed = manifest.differences(before.get("data", data), data)
    if changed:
        raise UserError(
            f"{folder} has a run with other data ({'; '.join(changed)}): restore them, or remove this directory, and the "
            "run begins again"
        )
    return result


@contextmanager
def same_manifest() -> Iterator[None]:
    """Says what to do about a run that cannot go on with these data, code or settings."""
    try:
        yield
    except manifest.OtherManifest as error:
        raise UserError(
            f"{error.workdir} has the beginning of a run with other data, code or settings ({error.differences}): restore "
            "them, or remove this directory, and the run begins again"
        ) from error


def require_same_data(results: Mapping[Trial, dict]) -> None:
    """Raises UserError if runs of a size, which may come from other machines, have read different data."""
    first: dict[tuple[str, str], str] = {}
    for trial, result in results.items():
        for name, digest in result.get("data", {}).items():  # a run that diverged has none
            other = first.setdefault((trial.cell.rung, name), digest)
            if other != digest:
                raise UserError(
                    f"{trial.folder}: its {name} has the digest {digest[:12]}, and that of the other runs {other[:12]}: all "
                    "runs of a size must read the same data. Use a new directory for the runs with one of the two"
                )


def machine_in_words(described: Mapping) -> str:
    """'processor, cores, devices' of hardware.describe_machine, and the precision of products if it was set."""
    precision = described.get("matmul_precision", "default")
    precise = "" if precision == "default" else f", matmul precision {precision}"
    cores = f"{described['cores']} core{'s' if described['cores'] > 1 else ''}"
    return f"{described['cpu']}, {cores}, {described['devices']}{precise}"


def short_commit(commit: str) -> str:
    """The first digits of hardware.git_commit, with its '-dirty'."""
    digits, dash, dirty = commit.partition("-")
    return f"{digits[:7] or 'no commit'}{dash}{dirty}"


def of_frequencies(config: Config) -> dict[str, float]:
    """The metrics of evaluation.summary on the held-out data that decide a study, of a model that knows how frequent each
    token or label is in training data, with add-one smoothing. An arm that does not beat it has learnt nothing."""
    tokenizer = tokenizer_of(config)
    weights = np.array(config.data.weights or [1] * len(config.data.corpus))  # shares of the sequences
    counts_V = np.ones(config.model.vocab_size)
    for corpus, weight in zip(config.data.corpus, weights / weights.max(), strict=True):
        counted_V, sequences = np.zeros(len(counts_V)), 0
        for targets_T, rows in _targets(config, "train", COUNTED, corpus):
            counted_V += np.bincount(targets_T, minlength=len(counts_V))
            sequences += rows
        counts_V += weight * counted_V * (COUNTED / sequences if len(weights) > 1 else 1)
    nll_V, likeliest = -np.log(counts_V / counts_V.sum()), int(counts_V.argmax())
    read = _targets(config, config.evaluation.split, config.evaluation.final_sequences)
    held_out_T = np.concatenate([targets_T for targets_T, _ in read])
    sums = {"nll": nll_V[held_out_T], "correct": held_out_T == likeliest, "tokens": np.ones(len(held_out_T))}
    if tokenizer is not None:
        held_out = prepare(config, config.evaluation.split)
        assert not isinstance(held_out, LabelledSplit), "labels have no tokenizer"
        sums["bytes"] = np.asarray(tokenizer.byte_lengths)[held_out_T] * held_out.byte_scale
    return summary(sums)


def check_coverage(study: Study, config: Config) -> str:
    """How much of the held-out text of a study does not come back from its tokens, in words. Raises UserError if nothing
    does, and bits per byte decide."""
    known = shares(prepare(config, config.evaluation.split).meta)
    allowed = f"'loss' or 'accuracy' with tokenizer {config.data.tokenizer}: nothing of the held-out text comes back"
    require(study.metric != "bits_per_byte" or known.get("lost_bytes") != 1, "metric", study.metric, allowed)
    return words(known)


def _targets(config: Config, split: str, limit: int, corpus: str | None = None) -> Iterator[tuple[np.ndarray, int]]:
    """(targets, number of sequences) of each batch of `limit` sequences of a split (0: all)."""
    for batch in evaluation_batches(prepare(config, split, corpus), ROWS, limit):
        scored_BL = batch["weights"] > 0
        yield batch["targets"][scored_BL], int(scored_BL.any(-1).sum())
