"""The metric of a model that knows how frequent each token or label is in training data, and nothing else. An arm that does
not beat it has learnt nothing."""

from collections.abc import Iterator

import numpy as np

from xfresearch.data.coverage import shares, words
from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import trains_on_labels
from xfresearch.data.pipeline import evaluation_batches, prepare
from xfresearch.data.tokenizers import tokenizer_for
from xfresearch.evaluation.losses import summary
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import require
from xfresearch.studies.design import Study

ROWS = 256  # sequences that are counted at a time
COUNTED = 16384  # sequences of each training corpus


def tokenizer_of(config: Config):
    """The tokenizer of a run; None for a data set with labels."""
    return None if trains_on_labels(config.data) else tokenizer_for(config.data)


def of_frequencies(config: Config) -> dict[str, float]:
    """The metrics of evaluation.summary on the held-out data that decide a study, for frequencies with add-one smoothing."""
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
