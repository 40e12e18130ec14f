"""The order in which a run reads the rows of a split: endless, and a pure function of the seed.

Every epoch draws the order of the shards anew. WINDOW consecutive ones are a window, and all rows of a window are in random
order. So the first rows are known as soon as the shards of the first window are there, and rows of up to WINDOW shards, a
whole corpus if it has no more, are shuffled as if they were one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

WINDOW = 8  # shards
_SEEDS = 1_000_003  # between the seeds of two windows of an epoch; between two epochs is one


class Parts(Protocol):
    """What an order needs of a split."""

    parts: int  # shards

    def rows_of(self, parts: Sequence[int]) -> list[int]:
        """The rows of shards. May wait until they are there."""


class _Window:
    """Consecutive shards of an epoch, whose rows are shuffled."""

    def __init__(self, shards: list[int], rows: list[int], first: int, seed: int, epoch: int):
        import grain

        self.shards, self.ends, self.first = shards, list(accumulate(rows)), first
        self.last = first + self.ends[-1]
        self._epoch = epoch
        self._shuffled: Any = grain.MapDataset.range(max(self.ends[-1], 1)).shuffle(seed=seed % 2**32)

    def __getitem__(self, place: int) -> tuple[int, int]:
        number = int(self._shuffled[self._epoch * self.ends[-1] + place - self.first])
        at = bisect_right(self.ends, number)
        return self.shards[at], number - (self.ends[at - 1] if at else 0)


def drawn(parts: int, seed: int, epoch: int) -> list[int]:
    """The shards of an epoch, in the order in which they are read."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(parts).tolist()


class Order:
    """order[i] is (shard, row) of the row that a run reads at place i of this split."""

    def __init__(self, split: Parts, seed: int):
        self._split, self._seed = split, seed
        self._epoch, self._windows = 0, [self._window(0, 0, 0)]
        self._rows = 0  # of an epoch, once all its windows were known

    def __getitem__(self, place: int) -> tuple[int, int]:
        epoch, place = divmod(place, self._rows) if self._rows else (0, place)
        if epoch != self._epoch:
            self._epoch, self._windows = epoch, [self._window(epoch, 0, 0)]
        while place >= self._windows[-1].last:
            if len(self._windows) * WINDOW >= self._split.parts:
                self._rows = self._windows[-1].last
                return self[place]
            self._windows.append(self._window(epoch, len(self._windows), self._windows[-1].last))
        return self._windows[bisect_right([each.last for each in self._windows], place)][place]

    def read_before(self, place: int) -> list[int]:
        """The shards that decide the rows before a place, in order: those of all windows until then."""
        if place:
            self[place - 1]
        if self._rows and place > self._rows:
            return list(range(self._split.parts))
        return [shard for each in self._windows if each.first < place for shard in each.shards]

    def _window(self, epoch: int, number: int, first: int) -> _Window:
        shards = drawn(self._split.parts, self._seed, epoch)[number * WINDOW : (number + 1) * WINDOW]
        return _Window(shards, self._split.rows_of(shards), first, self._seed + number * _SEEDS, epoch)


class OnePart:
    """A split that is one part for an order."""

    parts = 1

    def __len__(self) -> int:
        raise NotImplementedError

    def rows_of(self, parts: Sequence[int]) -> list[int]:
        return [len(self)]

    def part(self, number: int):
        return self
