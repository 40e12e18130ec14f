"""Words of several tokens, and numbers of nodes: what Depo and Brevo share (Allen-Zhu 2025, appendix A)."""

import random
from functools import cache

from xfresearch.runtime.errors import require

Word = tuple[int, ...]


def words(rng: random.Random, count: int, symbols: int, shortest: int, longest: int) -> list[Word]:
    """Different words in random order. A word has tokens from 1 to `symbols`; its last token is larger by `symbols`, which
    marks the end. Its length is uniform. If a word was drawn before, it is drawn again, with a new length."""
    drawn: dict[Word, None] = {}
    while len(drawn) < count:
        *start, end = (rng.randint(1, symbols) for _ in range(rng.randint(shortest, longest)))
        drawn[*start, end + symbols] = None
    return list(drawn)


def require_words(name: str, count: int, symbols: int, shortest: int, longest: int) -> None:
    """Raises UserError unless at least twice as many words exist as are drawn: otherwise drawing the last ones takes
    long."""
    require(shortest <= longest, f"data.corpus: {name}.longest_word", longest, f"at least shortest_word={shortest}")
    known = sum(symbols**length for length in range(shortest, longest + 1))
    require(2 * count <= known, f"data.corpus: {name}.nodes", count, f"at most {known // 2}, half of all words")


def number_of_nodes(rng: random.Random, most: int) -> int:
    """A number from 3 to `most`, n with probability ~ 1 / (n + sqrt(most)): small problems are seen more often."""
    return rng.choices(range(3, most + 1), cum_weights=_law(most))[0]


@cache
def _law(most: int) -> list[float]:
    weights, total = [], 0.0
    for n in range(3, most + 1):
        total += 1 / (n + most**0.5)
        weights.append(total)
    return weights
