"""Objectives that change what a model sees of a text: data.objective.kind other than 'next' and 'seq2seq'.

Each has a file here, with the functions `objective_of` and `row_length`. An objective makes a batch of rows of a packed text
(packed.py). Its random choices for a row depend on one number. In
training this is made of the seed of the run and the place of the row among all rows of the run, so that every epoch draws
anew; in an evaluation it is the row's index, so that held-out rows are always the same.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Protocol

import numpy as np

from xfresearch.data.packed import PackedSplit
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.options.run_options import RunConfig

HELD_OUT = 2**63  # the seed of held-out rows; those of runs are smaller


class Objective(Protocol):
    def __call__(self, rows: dict[str, np.ndarray], rngs: Sequence[np.random.Generator]) -> dict[str, np.ndarray]:
        """The batch of rows of packed.PackedSplit, with a generator for each."""


# The kinds of options/objectives.py that change packed rows. Pairs (seq2seq) are read by data/pairs.
FILES = {
    "masked": "xfresearch.data.objectives.masked",
    "span_corruption": "xfresearch.data.objectives.span_corruption",
    "prefix": "xfresearch.data.objectives.prefix",
}


def objective_of(run: RunConfig, tokenizer: Tokenizer) -> Objective | None:
    """The objective of a run; None if its batches are the packed rows themselves."""
    file = _file(run)
    return file.objective_of(run, tokenizer) if file else None


def _file(run: RunConfig) -> ModuleType | None:
    """The module of a run's objective, imported when it is used."""
    place = FILES.get(run.data.objective.kind)
    return import_module(place) if place else None


def row_length(run: RunConfig) -> int:
    """The number of tokens of a text from which an objective makes a row."""
    file = _file(run)
    return file.row_length(run) if file else run.sequence_length


def generators(seed: int, draws) -> list[np.random.Generator]:
    """A generator for each of the numbers `draws`."""
    return [np.random.Generator(np.random.Philox(key=np.array([seed, draw], np.uint64))) for draw in draws]


class Corrupted:
    """A split as a model with an objective sees it. It has the interface of packed.PackedSplit."""

    def __init__(self, split: PackedSplit, objective: Objective):
        self.split, self.objective = split, objective
        self.meta, self.digest, self.byte_scale = split.meta, split.digest, split.byte_scale
        self.parts, self.rows_of = split.parts, split.rows_of

    def __len__(self) -> int:
        return len(self.split)

    def read(self, indices, rngs: Sequence[np.random.Generator] = ()) -> dict[str, np.ndarray]:
        """Several sequences at once: arrays [n, L], with a generator for each. By default a sequence is always the same."""
        return self.objective(self.split.read(indices), rngs or generators(HELD_OUT, indices))
