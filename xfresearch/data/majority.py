"""`majority`: which class stands most often in a sequence? The task of Brody et al. 2023, section 3.1.

A sequence is L tokens, each one of C classes; its label, the same at every position, is the class that it holds most
often. Its counts, in descending order and whichever classes they are of, are a partition of L into at most C parts, two
or more. Of the partitions whose first part leads the second by `margin` at least, samples / per_partition are drawn at
random, none twice. `per_partition` sequences are made of each: which class has which count, and where it stands, is drawn
anew for each of them. The first 80 % of the partitions are the train split, the others the validation split.

The published code (tech-srl/layer_norm_expressivity_role) differs in four ways. Its partitions are neighbours of each
other: it walks through them depth first, in a random order, and stops when there are enough. The sequences of one
partition fall on both sides of its split. Its draw has no seed. And its tokens are sorted by their counts, so that the
last one is the label, which a model with positions could copy.
"""

import random
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from xfresearch.config.fields import option
from xfresearch.errors import require

TRAIN = 0.8


@dataclass(frozen=True)
class Majority:
    """The options behind the corpus's name, `majority:classes=10,margin=4`, and the sequences that they stand for."""

    classes: int = option(20, "classes C; tokens and labels are below it", low=2)
    samples: int = option(100_000, "sequences, in both splits together", low=2)
    per_partition: int = option(10, "sequences of each partition, all in one split", low=1)
    margin: int = option(6, "tokens by which the majority leads the next class, at least", low=1)
    seed: int = option(0, "of the draw: the run's own seed leaves the data as they are", low=0)

    splits = ("train", "validation")

    @property
    def vocab_size(self) -> int:
        return self.classes

    def check(self, length: int) -> None:
        """UserError where sequences of `length` tokens have too few partitions for the options."""
        there_are = number_of_partitions(length, self.classes, self.margin)
        said = f"sequences of {length} tokens have {there_are} partitions with it"
        require(there_are >= 2, "data.corpus: majority.margin", self.margin, f"smaller: {said}")
        whole = f"a multiple of per_partition={self.per_partition}, twice it at least"
        fits = self.samples % self.per_partition == 0 and self.samples >= 2 * self.per_partition
        require(fits, "data.corpus: majority.samples", self.samples, whole)
        most = there_are * self.per_partition
        said = f"at most {most}: sequences of {length} tokens have {there_are} partitions with margin={self.margin}"
        require(self.samples <= most, "data.corpus: majority.samples", self.samples, said)

    def examples(self, split: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens [N, L] and targets [N, L] of a split, int32; the same at every call."""
        tokens_NL, labels_N = _draw(self, length)
        partitions = self.samples // self.per_partition
        cut = min(max(round(TRAIN * partitions), 1), partitions - 1) * self.per_partition
        chosen = slice(cut) if split == "train" else slice(cut, None)
        return tokens_NL[chosen], np.broadcast_to(labels_N[chosen, None], tokens_NL[chosen].shape)


@lru_cache(maxsize=2)
def _draw(task: Majority, length: int) -> tuple[np.ndarray, np.ndarray]:
    """All sequences [N, L], those of a partition one after the other, and their labels [N]."""
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
    """`wanted` different numbers from 1 to `total`, which may be beyond 64 bits, in random order."""
    rng, found = random.Random(seed), {}
    while len(found) < wanted:
        found[rng.randrange(1, total + 1)] = None
    return list(found)


def number_of_partitions(length: int, classes: int, margin: int) -> int:
    """Of `length` into 2 to `classes` parts, the first of which leads the second by `margin`.

    Without the margin, taken off the first part, they are the partitions of the rest into at most `classes` parts, but
    for that into a single one.
    """
    return _table(length - margin, classes)[classes][length - margin] - 1 if length > margin else 0


def _partition(rank: int, total: int, parts: int) -> list[int]:
    """Partition number `rank` of `total` into at most `parts` parts, in descending order, filled up with zeros.

    Those whose last part is 0 come first, among which number 0 is `total` alone; of the others, 1 is taken off every part.
    """
    table, found = _table(total, parts), [0] * parts
    while total:
        if rank < table[parts - 1][total]:
            parts -= 1
        else:
            rank, total = rank - table[parts - 1][total], total - parts
            found[:parts] = [part + 1 for part in found[:parts]]
    return found


@cache
def _table(total: int, parts: int) -> list[list[int]]:
    """[k][n]: in how many ways n <= total is a sum of at most k <= parts parts. (n; k) = (n; k - 1) + (n - k; k)."""
    table = [[1] + [0] * total]
    for k in range(1, parts + 1):
        row = list(table[-1])
        for n in range(k, total + 1):
            row[n] += row[n - k]
        table.append(row)
    return table
