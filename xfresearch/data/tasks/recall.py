"""`recall`: which value followed this key? Multi-query associative recall (Arora et al. 2023, Zoology, section 3).

A sequence of L tokens has P `pairs` of a key and a value. Then each key comes once more, somewhere in the L - 2 P tokens
after the pairs; its label is its value. Places are drawn without replacement, place i with probability ~ i^(power - 1),
so that most keys come soon; with power=1 all places are as likely. The tokens between are random values.
Keys of a sequence differ, values need not. Keys are the tokens 0 to keys - 1, values the tokens after them.

With pairs=0, P is a third of L: the keys follow each other in random order, and a model with a state must hold all P pairs
at once. Difficulty is P. docs/playground.md says in what the published code differs.
"""

import random
from dataclasses import dataclass

from xfresearch.data.tasks.task import NO_LABEL, Sample, Task
from xfresearch.options.fields import option
from xfresearch.runtime.errors import require


@dataclass(frozen=True)
class Recall(Task):
    """The options of the corpus, as in `recall:keys=32,values=16`."""

    keys: int = option(64, "number of keys, at least one for each pair", low=1)
    values: int = option(64, "number of values", low=2)
    pairs: int = option(0, "pairs of a sequence; 0 for a third of its tokens", low=0)
    power: float = option(0.01, "of the law of the keys' places, from 0 (near) to 1 (uniform)", low=0.0, high=1.0)

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values

    def longest(self, length: int) -> int:
        return length

    def check(self, length: int) -> None:
        """Raises UserError if sequences of `length` tokens have no room for the pairs and keys, or more pairs than keys."""
        allowed = "a multiple of 3 with recall: two tokens of a pair, and its key"
        require(self.pairs > 0 or length % 3 == 0, "sequence_length", length, allowed)
        pairs = self.pairs or length // 3
        allowed = f"at most {length // 3}, for sequences of {length} tokens: two tokens of a pair, and its key"
        require(3 * pairs <= length, "data.corpus: recall.pairs", pairs, allowed)
        allowed = f"at least {pairs}, the pairs of a sequence of {length} tokens"
        require(self.keys >= pairs, "data.corpus: recall.keys", self.keys, allowed)

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        pairs = self.pairs or length // 3
        keys = rng.sample(range(self.keys), pairs)
        value_of = {key: self._value(rng) for key in keys}
        asked = dict(zip(self._places(rng, length - 2 * pairs, pairs), keys, strict=True))
        tokens = [token for pair in value_of.items() for token in pair]
        targets = [NO_LABEL] * len(tokens)
        for place in range(length - 2 * pairs):
            tokens.append(asked[place] if place in asked else self._value(rng))
            targets.append(value_of[asked[place]] if place in asked else NO_LABEL)
        answers, count = [], 0
        for target in targets:
            count += target != NO_LABEL
            answers.append(count if target != NO_LABEL else 0)
        return Sample(tokens, targets, answers, [pairs if answer else 0 for answer in answers])

    def _value(self, rng: random.Random) -> int:
        return self.keys + rng.randrange(self.values)

    def _places(self, rng: random.Random, room: int, count: int) -> list[int]:
        """`count` of `room` places in random order, drawn without replacement (Efraimidis and Spirakis 2006)."""
        waits = {place: rng.expovariate((place + 1) ** (self.power - 1)) for place in range(room)}
        return rng.sample(sorted(waits, key=waits.__getitem__)[:count], count)
