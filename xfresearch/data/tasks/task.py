"""What labelled data sets share: their interface, and samples that are drawn without end.

A task draws samples: a problem with its answers. Sequence i of a split is a pure function of the options, the split and i,
so a run never holds a split in memory, sees new samples at every update, and resumes exactly on any number of hosts.

A sequence of the train split has samples one after another until its L tokens are full; the last one is cut. A sequence of
another split has as many whole samples as always fit, so that long samples are not left out more often than short ones, and
then padding. Each sample is a segment: it does not see the others.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xfresearch.data.splits import SPLITS
from xfresearch.options.fields import option
from xfresearch.runtime.errors import require

NO_LABEL = -1
ENDLESS = 2**31 - 1  # sequences of a split that does not end; grain shuffles up to 2^32


class Examples(NamedTuple):
    """Sequences of a labelled data set: integer arrays [B, L]."""

    tokens: np.ndarray
    targets: np.ndarray  # the label of each token, NO_LABEL for none
    segments: np.ndarray  # from 1; 0 for padding
    answers: np.ndarray  # the number, from 1, of the answer that a label is a part of; 0 for no answer
    difficulty: np.ndarray  # of that answer


def one_label_each(tokens_BL: np.ndarray, targets_BL: np.ndarray) -> Examples:
    """Sequences without padding whose every label is an answer, all of difficulty 0."""
    labelled_BL = targets_BL != NO_LABEL
    answers_BL = np.where(labelled_BL, np.cumsum(labelled_BL, 1), 0)
    return Examples(tokens_BL, targets_BL, np.ones_like(tokens_BL), answers_BL, np.zeros_like(tokens_BL))


class Labelled:
    """A labelled data set with its options. Tokens and labels are less than `vocab_size`. Its methods must depend only on
    the options and the arguments, because every process of a run, and of a run that resumes, calls them."""

    splits: tuple[str, ...] = SPLITS

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    def check(self, length: int) -> None:
        """Raises UserError if the options contradict each other or do not allow sequences of `length` tokens."""
        raise NotImplementedError

    def size(self, split: str, length: int) -> int:
        """The number of sequences of a split, ENDLESS if it does not end."""
        raise NotImplementedError

    def read(self, split: str, indices: Sequence[int], length: int) -> Examples:
        """The sequences of a split with these numbers."""
        raise NotImplementedError

    def figures(self, measured: dict, parameters: int, examples: Examples) -> dict[str, float]:
        """Metrics that only this data set has. `measured` are those of a model with so many parameters on `examples`."""
        return {}

    # Of a data set whose answers have no single right form, so that they are generated and then checked:
    temperature: float | None = None  # of sampling; None if answers are not generated

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        raise NotImplementedError

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The problem of a sample: its tokens before the answer."""
        raise NotImplementedError

    def accepts(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether an answer, without its end, is right."""
        raise NotImplementedError


class Sample(NamedTuple):
    """A problem with its answers: values for each of its tokens, as in Examples."""

    tokens: Sequence[int]
    targets: Sequence[int]
    answers: Sequence[int]
    difficulty: Sequence[int]


class Answer(NamedTuple):
    """Tokens `start` to `end` - 1 of a sample are an answer."""

    start: int
    end: int
    difficulty: int


def next_tokens(tokens: Sequence[int], answers: Sequence[Answer], elsewhere: bool = False) -> Sample:
    """A sample whose labels are next tokens: those of the answers and, with `elsewhere`, all others too."""
    labels = [*tokens[1:], NO_LABEL]
    targets = labels if elsewhere else [NO_LABEL] * len(tokens)
    numbers, difficulty = [0] * len(tokens), [0] * len(tokens)
    for number, answer in enumerate(answers, 1):
        here, count = slice(answer.start - 1, answer.end - 1), answer.end - answer.start
        targets[here] = labels[here]
        numbers[here], difficulty[here] = [number] * count, [answer.difficulty] * count
    return Sample(tokens, targets, numbers, difficulty)


@dataclass(frozen=True)
class Task(Labelled):
    """A data set that is drawn without end. A subclass has `vocab_size`, `longest` and `sample`."""

    seed: int = option(0, "seed of the data; the seed of a run decides which of them it reads", low=0)
    held_out: int = option(4096, "sequences of the validation split", low=1)

    def longest(self, length: int) -> int:
        """Tokens of the longest sample, of a task whose sequences have `length` tokens."""
        raise NotImplementedError

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        """A sample to train on, or of the validation split."""
        raise NotImplementedError

    def check(self, length: int) -> None:
        name = type(self).__name__.lower()
        allowed = f"at least {self.longest(length)}, the longest sample of {name} with these options"
        require(length >= self.longest(length), "sequence_length", length, allowed)

    def size(self, split: str, length: int) -> int:
        return ENDLESS if split == "train" else self.held_out

    def read(self, split: str, indices: Sequence[int], length: int) -> Examples:
        rows = [self._row(split, int(index), length) for index in indices]
        return Examples(*np.array(rows, np.int32).reshape(len(rows), 5, length).swapaxes(0, 1))

    def _row(self, split: str, index: int, length: int) -> np.ndarray:
        """The arrays of Examples [5, L] of a sequence."""
        rng = random.Random(f"{self.seed} {split} {index}")
        held_out = split != "train"
        row_5L = np.zeros((5, length), np.int32)
        row_5L[1] = NO_LABEL
        begin = segment = answers = 0
        while segment < length // self.longest(length) if held_out else begin < length:
            sample = np.array(self.sample(rng, held_out, length))[:, : length - begin]
            segment, end = segment + 1, begin + sample.shape[1]
            sample[2] += np.where(sample[2], answers, 0)
            answers = max(answers, sample[2].max())
            row_5L[[0, 1, 3, 4], begin:end], row_5L[2, begin:end] = sample, segment
            begin = end
        return row_5L


def shares(weights: Sequence[float]) -> list[float]:
    """Cumulative weights, for random.choices."""
    return np.cumsum(weights).tolist()
