"""`recall`: which value followed this key? Multi-query associative recall (Arora et al. 2023, Zoology, section 3).

A sequence of L = 3 P tokens has P pairs of a key and a value, then the P keys again in another order. The label of a key
that comes again is its value; the other tokens have no label. Keys of a sequence differ, values need not. Keys are the
tokens 0 to keys - 1, values the tokens after them. The first 80 % of the sequences are the train split, the others the
validation split.

In the paper, keys that come again are spread over the sequence, most of them near their pair, and other tokens lie between
them. Here all pairs come first, so that a model with a state must hold all P of them at once.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from xfresearch.config.fields import option
from xfresearch.data.splits import SPLITS, rows_of
from xfresearch.runtime.errors import require

NO_LABEL = -1


@dataclass(frozen=True)
class Recall:
    """The options of the corpus, as in `recall:keys=32,values=16`, and the sequences that they define."""

    keys: int = option(64, "number of keys, at least sequence_length / 3", low=1)
    values: int = option(64, "number of values", low=2)
    samples: int = option(100_000, "number of sequences of both splits together", low=2)
    seed: int = option(0, "seed of the data; the seed of the run does not change the data", low=0)

    splits = SPLITS

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    def check(self, length: int) -> None:
        """Raises UserError if sequences of `length` tokens are not of pairs and keys, or have more pairs than keys."""
        require(length % 3 == 0, "sequence_length", length, "a multiple of 3 with recall: two tokens of a pair, and its key")
        allowed = f"at least {length // 3}, the pairs of a sequence of {length} tokens"
        require(self.keys >= length // 3, "data.corpus: recall.keys", self.keys, allowed)

    def examples(self, split: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens [N, L] and targets [N, L] of a split, int32. Every call returns the same values."""
        chosen = rows_of(split, self.samples)
        tokens_NL, targets_NL = _draw(self, length)
        return tokens_NL[chosen], targets_NL[chosen]


@lru_cache(maxsize=2)
def _draw(task: Recall, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of all sequences."""
    rng, N, P = np.random.default_rng(task.seed), task.samples, length // 3
    every_NK = np.broadcast_to(np.arange(task.keys, dtype=np.int32), (N, task.keys))
    keys_NP = rng.permuted(every_NK, axis=1)[:, :P]
    values_NP = rng.integers(task.keys, task.vocab_size, (N, P), dtype=np.int32)
    pairs_NL = np.stack([keys_NP, values_NP], -1).reshape(N, 2 * P)
    order_NP = rng.permuted(np.broadcast_to(np.arange(P), (N, P)), axis=1)
    again_NP, answer_NP = (np.take_along_axis(each_NP, order_NP, 1) for each_NP in (keys_NP, values_NP))
    return np.concatenate([pairs_NL, again_NP], 1), np.concatenate([np.full_like(pairs_NL, NO_LABEL), answer_NP], 1)
