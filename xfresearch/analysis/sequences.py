"""What analyses read: rows of tokens, and for a model with an encoder pairs, one in each row.

A row of a decoder has the start id and a target: its first token is only read, and its last one, which ends the target, only
predicted. Shorter sources and targets are padded at the end, and no figure counts padding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import has_labels
from xfresearch.data.pipeline import prepare
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.context import Source
from xfresearch.models.inputs import as_tokens, forward
from xfresearch.models.model_config import ModelConfig, check_length, longest_sequence
from xfresearch.models.sources import padded, source_of, target_ids
from xfresearch.models.taps import NO_TAPS, Request
from xfresearch.options.objectives import OBJECTIVES, Seq2Seq
from xfresearch.runtime.errors import UserError

ROWS = 32  # by default
SHORT = "they must have at least 2 tokens"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """N rows of tokens. segments_NL: 1, and 0 for padding at the end; None without padding. source: what the encoder of a
    model with two stacks reads, padded in the same way; None for a model of a single stack."""

    tokens_NL: Any
    segments_NL: Any = None
    source: Source | None = None

    def __len__(self) -> int:
        return len(self.tokens_NL)

    @property
    def real_NL(self):
        """Which tokens are no padding."""
        return _real(self.tokens_NL, self.segments_NL)

    @property
    def next_NL(self):
        """The token after each of `inputs`; 0 where `has_next_NL` is False."""
        missing = self.inputs.tokens_NL.shape[1] + 1 - self.tokens_NL.shape[1]
        return _module(self.tokens_NL).pad(self.tokens_NL[:, 1:], ((0, 0), (0, missing)))

    @property
    def has_next_NL(self):
        """Which of `inputs` have a next token that is no padding."""
        missing = self.inputs.tokens_NL.shape[1] + 1 - self.tokens_NL.shape[1]
        return _module(self.tokens_NL).pad(self.real_NL[:, 1:], ((0, 0), (0, missing)))

    @property
    def of_source(self) -> "Sequences":
        """The rows that the encoder reads."""
        assert self.source is not None
        return Sequences(self.source.tokens_BS, self.source.segments_BS)

    def of(self, prefix: str) -> "Sequences":
        """The rows that a stack reads, by the prefix of its taps: '' for the decoder."""
        return self.of_source if prefix else self

    @property
    def inputs(self) -> "Sequences":
        """What the model reads in training: of a pair without the token that ends the target."""
        return self if self.source is None else self.without_last()

    def without_last(self) -> "Sequences":
        """Without the last token of each row that is no padding."""
        segments_NL = None if self.segments_NL is None else self.segments_NL[:, :-1] * (self.segments_NL[:, 1:] > 0)
        return replace(self, tokens_NL=self.tokens_NL[:, :-1], segments_NL=segments_NL)

    def shortened(self, length: int) -> "Sequences":
        """The first tokens of each row, and of its source."""
        return jax.tree.map(lambda leaf: leaf[:, :length], self)

    def chosen(self, rows) -> "Sequences":
        """Some of the rows."""
        return jax.tree.map(lambda leaf: leaf[rows], self)

    def arguments(self) -> dict[str, Any]:
        """Those of a call of a LanguageModel."""
        return {"tokens_BL": self.tokens_NL, "segments_BL": self.segments_NL, "source": self.source}


def _real(tokens_NL, segments_NL):
    return _module(tokens_NL).ones(tokens_NL.shape, bool) if segments_NL is None else segments_NL > 0


def _module(x):
    return jnp if isinstance(x, jax.Array) else np


def sequences(
    lm: LanguageModel, data: Any = None, count: int = ROWS, length: int = 0, split: str = "", source: Any = None
) -> Sequences:
    """`count` rows of a corpus (its name; None for that of the model's run), or given ones: Sequences, token ids [N, L], and
    with an encoder a list of texts too, of different lengths, whose sources are `source` (models/sources.py). The default
    split is that of the held-out text. Raises UserError if there are none, for rows of a single token, which predicts
    nothing, and for a source without an encoder, or the other way round."""
    if isinstance(data, Sequences):
        return data
    of_corpus = data is None or isinstance(data, str)
    if of_corpus and source is not None and lm.config.encoder:
        allowed = "it is that of given texts or token ids: data=[...]"
        raise UserError(f"source is not allowed with data={data!r}: {allowed}")
    if lm.config.encoder:
        rows = _pairs(lm, data, count, length, split) if of_corpus else _given(lm, data, source)
    else:
        source_of(lm.config, lm.tokenizer, source, 0)  # its error
        rows = Sequences(_of_corpus(lm, data, count, length, split) if of_corpus else _tokens(lm, data))
    if rows.tokens_NL.shape[1] < 2:
        raise UserError(f"rows of {rows.tokens_NL.shape[1]} token are not allowed: {SHORT}")
    return rows


def training_rows(lm: LanguageModel, training: Any, data: Any, rows: Sequences, count: int) -> Sequences:
    """What an analysis trains on, beside the rows that it measures: given rows, or `count` rows of the train split of the
    corpus `data`, by default that of the model's run, of the same length."""
    if training is None:
        training = data if isinstance(data, str) else None
    length = 0 if rows.source is not None else rows.tokens_NL.shape[1]
    return sequences(lm, training, count, length, split="train")


def _tokens(lm: LanguageModel, data: Any) -> np.ndarray:
    return np.asarray(as_tokens(lm.config, lm.tokenizer, data))


def _of_corpus(lm: LanguageModel, data: str | None, count: int, length: int, split: str) -> np.ndarray:
    corpus, length = data or lm.run.data.corpus[0], length or lm.run.sequence_length
    if has_labels(corpus):
        check_length(lm.config, length)
        labelled = LabelledSplit(corpus, split or lm.run.evaluation.split, length)
        tokens_NL: np.ndarray = labelled.examples(range(min(count, len(labelled)))).tokens
        return tokens_NL
    taken = list(lm.batches(corpus, split, batch_size=count, length=length, limit=count))
    if not taken or not len(taken[0]):
        raise UserError(f"data={corpus!r} has no row of {length} tokens: give a smaller length")
    return taken[0]


def _pairs(lm: LanguageModel, data: str | None, count: int, length: int, split: str) -> Sequences:
    """The first pairs of a corpus, as the objective of the model's run makes them, with a row for each."""
    run, objective = lm.run, lm.run.data.objective
    if not objective.with_encoder or lm.tokenizer is None:
        kinds = ", ".join(name for name, each in OBJECTIVES.items() if each.with_encoder)
        lacks = "a tokenizer" if lm.tokenizer is None else f"data.objective.kind one of {kinds}"
        raise UserError(f"data={data!r} is not allowed: the run of this model needs {lacks} to read pairs; give source")
    objective = replace(objective, rows="padded") if isinstance(objective, Seq2Seq) else objective
    length = length or run.sequence_length
    check_length(lm.config, length)
    run = replace(run, sequence_length=length, data=replace(run.data, objective=objective))
    pairs = prepare(run, split or run.evaluation.split, data, lm.tokenizer)
    batch = pairs.read(range(min(count, len(pairs))))
    start_N1, ones_N1 = batch["tokens"][:, :1], np.ones_like(batch["tokens"][:, :1])
    tokens_NL = np.concatenate([start_N1, batch["targets"]], 1)[:, : longest_sequence(lm.config) or None]
    segments_NL = np.concatenate([ones_N1, batch["segments"]], 1)[:, : longest_sequence(lm.config) or None]
    source = Source(*_trimmed(batch["source"], batch["source_segments"]))
    return Sequences(*_trimmed(tokens_NL, segments_NL), source)


def _trimmed(tokens_NL, segments_NL) -> tuple[np.ndarray, np.ndarray]:
    """Without the columns in which all rows are padded."""
    longest = max(1, int((segments_NL > 0).sum(1).max()))
    return tokens_NL[:, :longest], segments_NL[:, :longest]


def _given(lm: LanguageModel, data: Any, source: Any) -> Sequences:
    """Given targets with their sources. The text of a target ends with end_of_text, as in training."""
    if isinstance(data, list | tuple) and data and all(isinstance(text, str) for text in data):
        ends = lm.tokenizer.end_of_text if lm.tokenizer else 0
        ids = [[*target_ids(lm.config, lm.tokenizer, text), ends] for text in data]
        given = padded(ids)
        check_length(lm.config, given.tokens_BS.shape[1])
        rows = Sequences(given.tokens_BS, given.segments_BS)
    else:
        rows = Sequences(_tokens(lm, data))
    read = source_of(lm.config, lm.tokenizer, source, len(rows))
    return jax.tree.map(np.asarray, replace(rows, source=read))


def passed(model: ModelConfig, params: dict[str, Any], rows: Sequences, taps: Request = NO_TAPS) -> tuple[Any, Any]:
    """The bound model and its Output of a pass over the rows. It may be traced."""
    return forward(model, params, rows.tokens_NL, taps, segments_BL=rows.segments_NL, source=rows.source)


def first_of_rows(batch: Mapping[str, Any]) -> Sequences:
    """The rows of a batch of training; of pairs, the first one of each row, which may be packed."""
    if "source" not in batch:
        return Sequences(np.asarray(batch["tokens"]))
    tokens_NL = np.concatenate([batch["tokens"][:, :1], batch["targets"]], 1)
    first_NL = (np.concatenate([batch["segments"][:, :1], batch["segments"]], 1) == 1).astype(np.int32)
    return Sequences(tokens_NL, first_NL, Source(batch["source"], (batch["source_segments"] == 1).astype(np.int32)))


def concatenated(parts: list[Sequences]) -> Sequences:
    """The rows of all parts. Those of pairs are padded to the longest one."""
    if parts[0].source is None:
        return Sequences(np.concatenate([each.tokens_NL for each in parts]))
    both = parts, [each.of_source for each in parts]
    (tokens_NL, segments_NL), sources = (_padded_together(of_stack) for of_stack in both)
    return Sequences(tokens_NL, segments_NL, Source(*sources))


def _padded_together(parts: list[Sequences]) -> list[np.ndarray]:
    """The tokens, and the segments, of all parts."""
    longest = max(each.tokens_NL.shape[1] for each in parts)
    arrays = [each.tokens_NL for each in parts], [each.real_NL for each in parts]
    return [
        np.concatenate([np.pad(x_NL, ((0, 0), (0, longest - x_NL.shape[1]))) for x_NL in each]).astype(np.int32)
        for each in arrays
    ]


def batches(rows: Sequences, batch: int) -> Iterator[tuple[Sequences, int]]:
    """The rows in batches of one size, and how many of its rows each has: the last one repeats its last row."""
    count, size = len(rows), min(batch, len(rows))
    for first in range(0, count, size):
        yield rows.chosen(np.minimum(np.arange(first, first + size), count - 1)), min(size, count - first)


def mean_of_tokens(x_BL, real_BL) -> jax.Array:
    """[B]: the mean over the tokens of a row that are no padding; of [B, L, ...] [B, ...]."""
    weights_BL = real_BL.reshape(real_BL.shape + (1,) * (x_BL.ndim - 2)).astype(x_BL.dtype)
    mean_B: jax.Array = (x_BL * weights_BL).sum(1) / weights_BL.sum(1)
    return mean_B
