"""`depo`: which word comes k words after this one? Multi-hop recall in the context (Allen-Zhu 2025, appendix A).

A sample is a cycle of n words: its n edges (word, next word) in random order, then up to `queries` questions about different
words. A question is a token for k, the word, the answer mark, and the k-th word after it on the cycle: the answer. In
training n has the law of number_of_nodes and k is uniform from 1 to `hops`; held-out cycles have `nodes` words, and k
is a power of 2 or `hops` itself. Difficulty is k.

Tokens: 0 begins a sample; 1 to 2 m are those of words; then one for each k; then the answer mark; then, if edges have one,
the separator, which the published code can write and the paper does not use. The paper's Depo1 has
N = 225, 300 or 375 words of 1 to 2 tokens (m = 50), its Depo2 N = 75, 100 or 125 of 5 to 7 (m = 4, in its code 3).
"""

import random
from dataclasses import dataclass

from xfresearch.data.tasks.node_words import number_of_nodes, require_words, words
from xfresearch.data.tasks.task import Answer, Sample, Task, next_tokens
from xfresearch.options.fields import option

BEGIN = 0


@dataclass(frozen=True)
class Depo(Task):
    """The options of the corpus, as in `depo:nodes=75,hops=16`."""

    nodes: int = option(225, "words N of the largest cycle; held-out cycles have as many", low=3)
    hops: int = option(8, "largest k that is asked for", low=1)
    queries: int = option(10, "questions about a cycle, at most one for each of its words", low=1)
    symbols: int = option(50, "symbols m of words", low=1)
    shortest_word: int = option(1, "fewest tokens of a word", low=1)
    longest_word: int = option(2, "most tokens of a word", low=1)
    separator: bool = option(False, "a token before each edge: it tells its two words apart, which is hard for small models")

    @property
    def vocab_size(self) -> int:
        return self.mark + 1 + self.separator

    @property
    def mark(self) -> int:
        """The token before an answer. Those of k are before it: mark - hops + k - 1."""
        return 1 + 2 * self.symbols + self.hops

    def longest(self, length: int) -> int:
        of_edge, of_question = 2 * self.longest_word + self.separator, 2 * self.longest_word + 2
        return 1 + self.nodes * of_edge + min(self.nodes, self.queries) * of_question

    def check(self, length: int) -> None:
        require_words("depo", self.nodes, self.symbols, self.shortest_word, self.longest_word)
        super().check(length)

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        n = self.nodes if held_out else number_of_nodes(rng, self.nodes)
        cycle = words(rng, n, self.symbols, self.shortest_word, self.longest_word)
        asked = [2**i for i in range(self.hops.bit_length()) if 2**i < self.hops] + [self.hops]
        tokens, answers, before = [BEGIN], [], (self.mark + 1,) * self.separator
        for at in rng.sample(range(n), n):
            tokens += before + cycle[at] + cycle[(at + 1) % n]
        for at in rng.sample(range(n), min(n, self.queries)):
            k = rng.choice(asked) if held_out else rng.randint(1, self.hops)
            answer = cycle[(at + k) % n]
            tokens += (self.mark - self.hops + k - 1, *cycle[at], self.mark, *answer)
            answers.append(Answer(len(tokens) - len(answer), len(tokens), k))
        return next_tokens(tokens, answers)
