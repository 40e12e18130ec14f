"""Objectives that change what a model sees of a text: data.objective.kind other than 'next' and 'seq2seq'.

An objective makes a batch of rows of a packed text (packed.py). Its random choices for a row depend on one number. In
training this is made of the seed of the run and the place of the row among all rows of the run, so that every epoch draws
anew; in an evaluation it is the row's index, so that held-out rows are always the same.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from xfresearch.data.objectives import prefix
from xfresearch.data.objectives.masked import Masked
from xfresearch.data.objectives.prefix import Prefix, RowPrefix
from xfresearch.data.objectives.span_corruption import SpanCorruption, raw_length
from xfresearch.data.packed import PackedSplit
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.options.run_options import RunConfig
from xfresearch.runtime.errors import require

HELD_OUT = 2**63  # the seed of held-out rows; those of runs are smaller


class Objective(Protocol):
    def __call__(self, rows: dict[str, np.ndarray], rngs: Sequence[np.random.Generator]) -> dict[str, np.ndarray]:
        """The batch of rows of packed.PackedSplit, with a generator for each."""


def objective_of(config: RunConfig, tokenizer: Tokenizer) -> Objective | None:
    """The objective of a run; None if its batches are the packed rows themselves."""
    options = config.data.objective
    if options.kind == "masked":
        return Masked.of(options, tokenizer)
    if options.kind == "span_corruption":
        return SpanCorruption.of(options, tokenizer, config.source_length, config.sequence_length)
    if options.kind == "prefix":
        if config.source_length:
            return Prefix.of(options, tokenizer, config.source_length, config.sequence_length)
        require(options.lengths == "random", "data.objective.lengths", options.lengths, "'random' without an encoder")
        return RowPrefix()
    return None


def row_length(config: RunConfig) -> int:
    """The number of tokens of a text from which an objective makes a row."""
    options = config.data.objective
    if options.kind == "span_corruption":
        return raw_length(config.source_length, options.noise_density, options.mean_span)
    if options.kind == "prefix" and config.source_length:
        return prefix.row_length(options, config.source_length, config.sequence_length)
    return config.sequence_length


def generators(seed: int, draws) -> list[np.random.Generator]:
    """A generator for each of the numbers `draws`."""
    return [np.random.Generator(np.random.Philox(key=np.array([seed, draw], np.uint64))) for draw in draws]


class Corrupted:
    """A split as a model with an objective sees it. It has the interface of packed.PackedSplit."""

    def __init__(self, split: PackedSplit, objective: Objective):
        self.split, self.objective = split, objective
        self.meta, self.digest, self.byte_scale = split.meta, split.digest, split.byte_scale

    def __len__(self) -> int:
        return len(self.split)

    def read(self, indices, rngs: Sequence[np.random.Generator] = ()) -> dict[str, np.ndarray]:
        """Several sequences at once: arrays [n, L], with a generator for each. By default a sequence is always the same."""
        return self.objective(self.split.read(indices), rngs or generators(HELD_OUT, indices))
