"""`majority`: which class is the most frequent in a sequence? The task of Brody et al. 2023, section 3.1.

A sequence has L tokens, each one of C classes. Its label, the same at every position, is its most frequent class. The
counts of its classes, sorted in descending order, are a partition of L into 2 to C parts. Only partitions whose first
part exceeds the second by at least `margin` are used. samples / per_partition of them are drawn at random without
replacement. Each gives `per_partition` sequences; which class has which count, and the order of the tokens, are drawn
for each sequence. The first 80 % of the partitions are the train split, the others the validation split.

The published code (tech-srl/layer_norm_expressivity_role) differs in four ways. Its partitions are similar to each
other: it enumerates them depth first in a random order and stops when it has enough. The sequences of one partition
fall into both of its splits. It does not seed the draw. It sorts tokens by their counts, so the last token is the label,
which a model with positions could copy.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from xfresearch.data.splits import rows_of
from xfresearch.data.tasks.task import Examples, Labelled, one_label_each
from xfresearch.options.fields import option
from xfresearch.runtime.errors import require


@dataclass(frozen=True)
class Majority(Labelled):
    """The options of the corpus, as in `majority:classes=10,margin=4`, and the sequences that they define."""

    classes: int = option(20, "number of classes C; tokens and labels are less than it", low=2)
    samples: int = option(100_000, "number of sequences of both splits together", low=2)
    per_partition: int = option(10, "sequences of each partition; all are in one split", low=1)
    margin: int = option(6, "minimum lead of the most frequent class over the next, in tokens", low=1)
    seed: int = option(0, "seed of the data; the seed of the run does not change the data", low=0)

    @property
    def vocab_size(self) -> int:
        return self.classes

    def check(self, length: int) -> None:
        """Raises UserError if sequences of `length` tokens have too few partitions for the options."""
        partitions = number_of_partitions(length, self.classes, self.margin)
        reason = f"sequences of {length} tokens have {partitions} partitions with this margin"
        require(partitions >= 2, "data.corpus: majority.margin", self.margin, f"smaller: {reason}")
        per = self.per_partition
        divisible = self.samples % per == 0 and self.samples >= 2 * per
        allowed = f"a multiple of per_partition={per}, at least {2 * per}"
        require(divisible, "data.corpus: majority.samples", self.samples, allowed)
        most = partitions * per
        reason = f"sequences of {length} tokens have {partitions} partitions with margin={self.margin}"
        require(self.samples <= most, "data.corpus: majority.samples", self.samples, f"at most {most}: {reason}")

    def size(self, split: str, length: int) -> int:
        return len(range(self.samples)[self._rows(split)])

    def read(self, split: str, indices: Sequence[int], length: int) -> Examples:
        chosen = np.arange(self.samples)[self._rows(split)][np.asarray(indices, int)]
        tokens_NL, labels_N = _draw(self, length)
        tokens_BL = tokens_NL[chosen]
        return one_label_each(tokens_BL, np.broadcast_to(labels_N[chosen, None], tokens_BL.shape))

    def _rows(self, split: str) -> slice:
        return rows_of(split, self.samples // self.per_partition, self.per_partition)


@lru_cache(maxsize=2)
def _draw(task: Majority, length: int) -> tuple[np.ndarray, np.ndarray]:
    """All sequences [N, L] and their labels [N]. The sequences of one partition are adjacent."""
    ranks = _ranks(
        task.samples // task.per_partition, number_of_partitions(length, task.classes, task.margin), task.seed
    )
    counts_PC = np.array([_partition(rank, length - task.margin, task.classes) for rank in ranks])
    counts_PC[:, 0] += task.margin
    counts_NC = np.repeat(counts_PC, task.per_partition, 0)
    rng = np.random.default_rng(task.seed)
    classes_NC = rng.permuted(np.tile(np.arange(task.classes, dtype=np.int32), (task.samples, 1)), axis=1)
    tokens_NL = np.repeat(classes_NC.ravel(), counts_NC.ravel()).reshape(task.samples, length)
    return rng.permuted(tokens_NL, axis=1), classes_NC[:, 0]


def _ranks(wanted: int, total: int, seed: int) -> list[int]:
    """`wanted` distinct numbers from 1 to `total`, in random order. `total` may exceed 64 bits."""
    rng = random.Random(seed)
    ranks: dict = {}
    while len(ranks) < wanted:
        ranks[rng.randrange(1, total + 1)] = None
    return list(ranks)


def number_of_partitions(length: int, classes: int, margin: int) -> int:
    """Partitions of `length` into 2 to `classes` parts whose first part exceeds the second by at least `margin`.

    Subtract the margin from the first part: the remainder is any partition of length - margin into at most `classes`
    parts, except the one with a single part.
    """
    return _table(length - margin, classes)[classes][length - margin] - 1 if length > margin else 0


def _partition(rank: int, total: int, parts: int) -> list[int]:
    """Partition number `rank` of `total` into at most `parts` parts, in descending order, padded with zeros.

    Partitions whose last part is 0 come first; number 0 is (total, 0, ...). For the others, subtract 1 from every part.
    """
    table = _table(total, parts)
    counts = [0] * parts
    while total:
        if rank < table[parts - 1][total]:
            parts -= 1
        else:
            rank -= table[parts - 1][total]
            total -= parts
            counts[:parts] = [part + 1 for part in counts[:parts]]
    return counts


@cache
def _table(total: int, parts: int) -> list[list[int]]:
    """[k][n]: partitions of n <= total into at most k <= parts parts. (n; k) = (n; k - 1) + (n - k; k)."""
    table = [[1] + [0] * total]
    for k in range(1, parts + 1):
        row = list(table[-1])
        for n in range(k, total + 1):
            row[n] += row[n - k]
        table.append(row)
    return table
