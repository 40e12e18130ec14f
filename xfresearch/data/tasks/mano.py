"""`mano`: the value of an arithmetic expression, without writing intermediate values (Allen-Zhu 2025, appendix A).

A sample is a token for l, an expression of l operations in prefix form, the answer mark of l, and its value. Operations are
+, - and *, operands 0 to modulus - 1, and all is computed modulo `modulus`. The expression of l operations has an operation,
whose first part has U(0, l - 1) operations, and whose second part has the rest. In training l is uniform from 1 to
`operations`, and every token is a label. Held-out expressions have `operations`, and the value alone is a label. Difficulty
is l.

Each operation, each l, the begin and the answer marks have two tokens, of which one is drawn. Tokens: the values; two each
of +, -, *; two for each l; two answer marks for each l; two that begin a sample. The paper has l up to 10, 13 or 16.
"""

import operator
import random
from dataclasses import dataclass

from xfresearch.data.tasks.task import Answer, Sample, Task, next_tokens
from xfresearch.options.fields import option

OPERATIONS = (operator.add, operator.sub, operator.mul)
NAMES = 2  # tokens of the same meaning


@dataclass(frozen=True)
class Mano(Task):
    """The options of the corpus, as in `mano:operations=13`."""

    operations: int = option(10, "operations L of the longest expression; held-out expressions have as many", low=1)
    modulus: int = option(23, "numbers of values", low=2)

    @property
    def vocab_size(self) -> int:
        return self.modulus + NAMES * (len(OPERATIONS) + 2 * self.operations + 1)

    def longest(self, length: int) -> int:
        return 2 * self.operations + 5

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        count = self.operations if held_out else rng.randint(1, self.operations)
        expression, value = self._expression(rng, count)
        lengths, marks = (len(OPERATIONS) + first + count - 1 for first in (0, self.operations))
        begin = len(OPERATIONS) + 2 * self.operations
        tokens = [self._name(rng, begin), self._name(rng, lengths), *expression, self._name(rng, marks), value]
        return next_tokens(tokens, [Answer(len(tokens) - 1, len(tokens), count)], elsewhere=not held_out)

    def _name(self, rng: random.Random, number: int) -> int:
        """One of the tokens of the meaning with this number; values have the tokens before."""
        return self.modulus + NAMES * number + rng.randrange(NAMES)

    def _expression(self, rng: random.Random, count: int) -> tuple[list[int], int]:
        """The tokens of an expression, and its value."""
        if not count:
            value = rng.randrange(self.modulus)
            return [value], value
        number = rng.randrange(len(OPERATIONS))
        in_first = rng.randint(0, count - 1)
        first, a = self._expression(rng, in_first)
        second, b = self._expression(rng, count - 1 - in_first)
        return [self._name(rng, number), *first, *second], OPERATIONS[number](a, b) % self.modulus
