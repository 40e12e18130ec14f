"""Held-out loss of whole sequences, for models that predict something else than each next token of a text: labels, masked
tokens, targets. Training measures the same loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xfresearch.data.labels import has_labels, predicted, trains_on_labels
from xfresearch.data.pipeline import Split, evaluation_batches, prepare
from xfresearch.evaluation.losses import SUMS, on_host
from xfresearch.models.model_config import check_length
from xfresearch.runtime.errors import UserError


class Rows(NamedTuple):
    """A split in sequences, and the settings of its evaluation."""

    corpus: str
    split: str
    sequences: Split
    rows: range  # its length is the number of sequences to evaluate, which are spread evenly over the split
    length: int
    target: str  # what is predicted
    unit: str = "sequences"

    @property
    def description(self) -> str:
        return f"sequences of {self.length} tokens"

    @property
    def digest(self) -> str:
        return self.sequences.digest


def read_rows(lm, workdir, corpus="", split="", length=0, limit=0) -> Rows:
    """Reads a split of a corpus as `lm`, which was loaded from `workdir`, was trained. The defaults are the data and
    settings of the evaluation during its training.

    `limit` is a number of sequences (0: all). Raises UserError if a value does not fit the model or the data.
    """
    corpus = corpus or lm.run.data.corpus[0]
    split = split or lm.run.evaluation.split
    length = length or lm.run.sequence_length
    check_length(lm.config, length)
    labels = trains_on_labels(lm.run.data)
    if has_labels(corpus) != labels:
        has = "has no labels" if labels else "has labels"
        raise UserError(f"corpus {corpus!r} is not allowed: it {has}, and {workdir} predicts {predicted(lm.run.data)}")
    sequences = prepare(replace(lm.run, sequence_length=length), split, corpus, lm.tokenizer)
    classes = sequences.meta["vocab_size"] if labels else 0
    if classes > lm.config.vocab_size:
        raise UserError(f"corpus {corpus!r} has {classes} classes; the model's vocabulary has {lm.config.vocab_size}")
    used = range(min(limit or len(sequences), len(sequences)))
    return Rows(corpus, split, sequences, used, length, "label" if labels else "token")


def row_sums(
    scorer: Callable,
    params: dict,
    data: Rows,
    batch_size: int,
    progress=lambda rows: None,
    place=lambda batch: batch,
) -> dict[str, np.ndarray]:
    """The sums over each sequence [U], by the names in SUMS. `scorer` is from `make_scorer`.

    Calls `progress(rows)` after every batch. `place` moves a batch to the scorer's devices.
    """
    parts = []
    for batch in evaluation_batches(data.sequences, batch_size, len(data.rows)):
        nll_BL, correct_BL = on_host(dict(enumerate(scorer(params, place(batch))))).values()
        parts.append((nll_BL.sum(-1), correct_BL.sum(-1), batch["weights"].sum(-1)))
        progress(int(batch["segments"].any(-1).sum()))  # without the rows of padding in the last batch
    sums = map(np.concatenate, zip(*parts, strict=True))
    return {name: values[: len(data.rows)] for name, values in zip(SUMS, sums, strict=True)}
