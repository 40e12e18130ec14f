"""Tasks whose pairs are generated without end: `sort`, `reverse`, and what they share with `translation`.

Pair number n of a split is a function of n, the split and the task's seed. The hash of a source decides its split, so a
source of a held-out pair is never trained on.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice

from xfresearch.data.tasks.task import ENDLESS
from xfresearch.data.text_sources import SPLITS, split_of
from xfresearch.options.fields import option
from xfresearch.runtime.errors import UserError, require

SAMPLE = 2000  # pairs that a tokenizer is trained on
TRIES = 10_000  # draws in search of a pair of a split; one in 20 sources is in a held-out split


@dataclass(frozen=True)
class PairTask:
    """The options that all tasks have. A task has a method `draw(rng) -> (source, target)` of texts."""

    held_out: int = option(2000, "pairs of the validation split, and of the test split", low=1)
    seed: int = option(0, "seed of the data; the seed of the run does not change the data", low=0)

    splits = SPLITS

    def draw(self, rng: random.Random) -> tuple[str, str]:
        raise NotImplementedError

    def identity(self) -> dict:
        return {"task": type(self).__name__, **asdict(self)}

    def rows(self, split: str) -> int:
        return ENDLESS if split == "train" else self.held_out

    def endless(self, split: str, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Pairs of a split without end, which begin with pair `number`. Raises UserError if the split has none."""
        rng = random.Random(f"{self.seed}/{split}/{number}")
        while True:
            for _ in range(TRIES):
                source, target = (text.encode() for text in self.draw(rng))
                if split_of(source) == split:
                    break
            else:
                raise UserError(f"data.corpus: {self!r} has too few sources for a {split} split")
            yield source, target

    def pairs(self, split: str) -> Iterator[tuple[bytes, bytes]]:
        """Pairs 0, 1, ... of a split."""
        for number in range(self.rows(split)):
            yield next(self.endless(split, number))

    def documents(self, split: str) -> Iterator[bytes]:
        for pair in islice(self.pairs(split), SAMPLE):
            yield from pair

    def n_bytes(self, split: str) -> int:
        return self._sample_bytes

    @cached_property
    def _sample_bytes(self) -> int:
        return sum(map(len, self.documents("train")))


@dataclass(frozen=True)
class Sort(PairTask):
    """`sort`: letters, and then the same letters in the order of the alphabet."""

    shortest: int = option(4, "letters of the shortest source", low=1)
    longest: int = option(12, "letters of the longest source", low=1)
    letters: int = option(26, "letters of the alphabet", low=2, high=26)

    def __post_init__(self):
        allowed = f"at least shortest={self.shortest}"
        require(self.longest >= self.shortest, f"data.corpus: {type(self).__name__.lower()}.longest", self.longest, allowed)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        size = rng.randint(self.shortest, self.longest)
        source = "".join(chr(ord("a") + rng.randrange(self.letters)) for _ in range(size))
        return source, self.answer(source)

    def answer(self, source: str) -> str:
        return "".join(sorted(source))


@dataclass(frozen=True)
class Reverse(Sort):
    """`reverse`: letters, and then the same letters from the last to the first."""

    def answer(self, source: str) -> str:
        return source[::-1]
