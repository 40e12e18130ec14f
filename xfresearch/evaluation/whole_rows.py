"""Held-out loss of whole sequences, for models that predict something else than each next token of a text: labels, masked
tokens, targets. Training measures the same loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xfresearch.data.labels import has_labels, predicted, trains_on_labels
from xfresearch.data.pipeline import Split, evaluation_batches, prepare
from xfresearch.data.tasks.task import ENDLESS
from xfresearch.evaluation.losses import SUMS, on_host, right_answers, summary
from xfresearch.models.model_config import check_length
from xfresearch.runtime.errors import UserError

OF_ANSWERS = ("right", "difficulty")  # sums of each answer, not of each sequence


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
    def meta(self) -> dict[str, Any]:
        return self.sequences.meta

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
    if len(sequences) == ENDLESS and not limit:
        raise UserError(f"--limit=0 is not allowed with split {split!r} of {corpus!r}, which does not end")
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
    """The sums over each sequence [U], by the names in losses.SUMS. Data with answers also have the number of 'answers' [U],
    and for each answer [A] whether it is 'right', and its 'difficulty'. `scorer` is from `losses.make_scorer`.

    Calls `progress(rows)` after every batch. `place` moves a batch to the scorer's devices.
    """
    parts: list[dict[str, np.ndarray]] = []
    for batch in evaluation_batches(data.sequences, batch_size, len(data.rows)):
        nll_BL, correct_BL = on_host(dict(enumerate(scorer(params, place(batch))))).values()
        sums = dict(zip(SUMS, (nll_BL.sum(-1), correct_BL.sum(-1), batch["weights"].sum(-1)), strict=True))
        if "answers" in batch:
            right_BA, sums["answers"] = map(np.asarray, right_answers(jnp.asarray(correct_BL), batch["answers"]))
            given_BA, difficulty_BA = _difficulty(batch["answers"], batch["difficulty"])
            sums["correct"] = right_BA.sum(-1)
            sums |= {"right": right_BA[given_BA], "difficulty": difficulty_BA[given_BA]}
        parts.append(sums)
        progress(int(batch["segments"].any(-1).sum()))  # without the rows of padding in the last batch
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {name: values if name in OF_ANSWERS else values[: len(data.rows)] for name, values in whole.items()}


def _difficulty(answers_BL: np.ndarray, difficulty_BL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether a sequence has an answer of each number [B, A], and its difficulty [B, A]."""
    given_BA, difficulty_BA = np.zeros(answers_BL.shape, bool), np.zeros(answers_BL.shape, int)
    rows, columns = np.nonzero(answers_BL)
    numbers = answers_BL[rows, columns] - 1
    given_BA[rows, numbers], difficulty_BA[rows, numbers] = True, difficulty_BL[rows, columns]
    return given_BA, difficulty_BA


def metrics(sums: dict[str, np.ndarray]) -> dict[str, Any]:
    """losses.summary of `row_sums`. Data with answers also have `by_difficulty`: {difficulty: accuracy and number of its
    answers}."""
    if "difficulty" not in sums:
        return summary(sums)
    right = {level: sums["right"][sums["difficulty"] == level] for level in np.unique(sums["difficulty"]).tolist()}
    each = {str(level): {"accuracy": float(right_A.mean()), "answers": len(right_A)} for level, right_A in right.items()}
    return summary(sums) | {"by_difficulty": each}
