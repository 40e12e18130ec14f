"""Held-out losses of several models on the text of the first one's run, paired by unit of text.

A unit is a document or, if the text is a single document, a sequence of the first run. Models with other tokenizers read
the same bytes of the text: each of their tokens belongs to the unit of the first run that contains its first byte.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from xfresearch.checkpoints import manifest
from xfresearch.comparing.pairing import correct, of_runs, pair_ratios, ratio
from xfresearch.data import coverage
from xfresearch.data.labels import predicted, predicts_next
from xfresearch.evaluation import held_out, losses
from xfresearch.evaluation.whole_rows import Rows
from xfresearch.harness.measuring import saved_tasks
from xfresearch.loading.language_model import LanguageModel
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError


class Reference(NamedTuple):
    """The held-out data as the first model reads them."""

    config: Config
    data: losses.Text | Rows
    tokenizer: str


class Loaded(NamedTuple):
    """A model to measure. `data` is None for the first one: `first_reads` reads its data."""

    path: str
    lm: LanguageModel
    mesh: Mesh | None
    config: Config
    tokenizer: str  # its digest; '' without one
    tasks: dict[str, dict]  # saved answers
    data: losses.Text | Rows | None


class Measured(NamedTuple):
    """The losses and costs of one model in a comparison."""

    step: int
    config: Config
    tokenizer: str
    tasks: dict[str, dict]
    sums: dict[str, np.ndarray]  # over the units of text [U], by the names of losses.unit_sums
    lost: str  # how much of the data does not come back from the model's tokens, in words


def load(path: str, options, reference: Reference | None) -> Loaded:
    """Loads the model at `path` and reads the data of `reference`. Raises UserError if the run has no intact checkpoint
    or its model cannot read these data."""
    lm, mesh = held_out.open_model(path)
    config = replace(lm.run, model=lm.config)
    digest = lm.tokenizer.digest if lm.tokenizer else ""
    tasks = saved_tasks(path, lm, options.sequence_length)
    data = _same_data(lm, path, digest, options, reference) if reference else None
    return Loaded(path, lm, mesh, config, digest, tasks, data)


def first_reads(model: Loaded, options) -> Reference:
    """The held-out data of the first model's run. Raises UserError if the flags do not fit the model or the data."""
    return Reference(model.config, held_out.read(model.lm, model.path, options), model.tokenizer)


def measure(model: Loaded, options, reference: Reference) -> Measured:
    """Scores the model on the data of `reference`."""
    data = model.data or reference.data
    step = model.lm.step
    manifest.require_same_everywhere({f"checkpoint of {model.path}": str(step), "held-out data": data.digest})
    scores = held_out.Scorer(model.lm, data, options.batch_size, model.mesh)(model.lm.params, model.path)
    lost = coverage.words(coverage.shares(data.meta))
    if isinstance(data, Rows):
        return Measured(step, model.config, model.tokenizer, model.tasks, scores, lost)
    assert isinstance(reference.data, losses.Text), "text is compared with text"
    return Measured(step, model.config, model.tokenizer, model.tasks, _unit_sums(data, scores, reference.data), lost)


def _same_data(lm: LanguageModel, path: str, digest: str, options, reference: Reference):
    """The data of `reference` as `lm` reads them. Its run gets the settings of the reference's evaluation."""
    names = ("data", "evaluation", "sequence_length", "batch_size")
    lm.run = replace(lm.run, **{name: getattr(reference.config, name) for name in names})
    if digest == reference.tokenizer:
        return held_out.read(lm, path, options)
    if not predicts_next(lm.run.data):
        raise UserError(f"RUN={path} is not allowed: its tokenizer is another one, and it predicts {predicted(lm.run.data)}")
    text = losses.read_text(lm, path, options.data, options.split, options.sequence_length, options.stride)
    for name, each in (("its", text), ("the first run's", reference.data)):
        if coverage.shares(each.meta).get("lost_bytes") == 1:
            why = f"nothing of the held-out text comes back from {name} tokens, so there are no bits per byte to compare"
            raise UserError(f"RUN={path} is not allowed: its tokenizer is another one, and {why}")
    starts_T = byte_starts(text)
    assert isinstance(reference.data, losses.Text), "rows have no tokenizer"
    end = edges(reference.data)[-1]
    return text._replace(rows=[row for row in text.rows if starts_T[row[0].scored] < end])


def _unit_sums(text: losses.Text, scores: losses.Scores, reference: losses.Text) -> dict[str, np.ndarray]:
    """The sums over the units of `reference` [U] of the tokens that start in its text."""
    starts_T = byte_starts(text)
    edges_U1 = edges(reference)
    scored_T = (scores.row >= 0) & ((starts_T < edges_U1[-1]) | (text.digest == reference.digest))
    if reference.unit == "documents":
        units_T, count = text.documents, reference.documents[-1] + 1
    else:
        count = len(reference.rows)
        units_T = np.clip(np.searchsorted(edges_U1, starts_T, side="right") - 1, 0, count - 1)
    sums = losses.unit_sums(text, scores._replace(row=np.where(scored_T, scores.row, -1)), units_T)
    return {name: np.pad(values, (0, count - len(values))) for name, values in sums.items()}


def byte_starts(text: losses.Text) -> np.ndarray:
    """The byte of the text at which each token starts [T]."""
    return np.cumsum(text.sizes["bytes"]) - text.sizes["bytes"]


def edges(text: losses.Text) -> np.ndarray:
    """The byte at which each sequence starts to be scored, and the byte at which the last one ends [U + 1]."""
    starts_T = byte_starts(text)
    last = text.rows[-1][-1].end - 1
    return np.array([*(starts_T[row[0].scored] for row in text.rows), starts_T[last] + text.sizes["bytes"][last]])


def compare(sums: dict[str, dict[str, np.ndarray]], measure: str, margin: float) -> dict[str, dict]:
    """{run: its loss, its standard error and, except for the first run, the paired comparison with the first run}.

    `sums` has the sums over units [U] of each run. `measure` is 'loss', in nats per token, or 'bits_per_byte'.
    """
    losses = {run: _loss(own, measure) for run, own in sums.items()}
    first, *others = losses
    pairs = {run: pair_ratios(losses[run], losses[first]) for run in others}
    correct(pairs.values())
    judged = {run: {"pair": pair | {"verdict": of_runs("text", pair, margin)}} for run, pair in pairs.items()}
    return {run: ratio(*losses[run]) | judged.get(run, {}) for run in losses}


def _loss(sums: dict[str, np.ndarray], measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Sums over units [U] whose ratio is the loss: nats and tokens, or bits and bytes."""
    if measure == "loss":
        return sums["nll"].astype(float), sums["tokens"].astype(float)
    return sums["nll"] / np.log(2), sums["bytes"].astype(float)
