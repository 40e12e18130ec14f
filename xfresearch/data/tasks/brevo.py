"""`brevo`: on which nodes does this one depend? Reasoning over a graph (Allen-Zhu 2025, appendix A).

A sample is a directed graph of n nodes without cycles. The first U(1, (n - 1) // 4 + 1) nodes depend on none; each other
node depends on 1 to 4 of the nodes before it on which fewer than 4 others depend. The sample has the edges (parent, child)
in random order, the query mark, the last node, the answer mark, then all nodes on which it depends, itself last, in a
topological order that is drawn, and the end. Any other topological order is as right: `accepts` decides.

In training n has the law of number_of_nodes; held-out graphs have `nodes` nodes. Difficulty is the number of edges of
the shortest way from the query to a node that depends on none.

Tokens: 0 begins a sample. With symbols=0, as in the paper's Brevo1 (N = 70, 90, 110), a node is one token of 1 to N. Else,
as in its Brevo2 (N = 30, 40, 50; m = 4), it is a word of `shortest_word` to `longest_word` tokens over m symbols. Then the
query mark, the answer mark and the end.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xfresearch.data.tasks.node_words import Word, number_of_nodes, require_words, words
from xfresearch.data.tasks.task import Answer, Sample, Task, next_tokens
from xfresearch.options.fields import option

BEGIN, DEGREE = 0, 4
Parents = Mapping[Word, Sequence[Word]]  # of each node, those on which it depends


@dataclass(frozen=True)
class Brevo(Task):
    """The options of the corpus, as in `brevo:nodes=30,symbols=4`."""

    nodes: int = option(70, "nodes N of the largest graph; held-out graphs have as many", low=3)
    symbols: int = option(0, "symbols m of words; 0 for nodes of one token", low=0)
    shortest_word: int = option(2, "fewest tokens of a word", low=1)
    longest_word: int = option(4, "most tokens of a word", low=1)

    temperature = 0.0

    @property
    def vocab_size(self) -> int:
        return self.end + 1

    @property
    def end(self) -> int:
        """The token that ends an answer. The answer mark and the query mark are before it."""
        return 3 + (2 * self.symbols or self.nodes)

    def longest(self, length: int) -> int:
        edges = sum(min(DEGREE, earlier) for earlier in range(1, self.nodes))
        return 4 + (2 * edges + 1 + self.nodes) * (self.longest_word if self.symbols else 1)

    def check(self, length: int) -> None:
        if self.symbols:
            require_words("brevo", self.nodes, self.symbols, self.shortest_word, self.longest_word)
        super().check(length)

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        n = self.nodes if held_out else number_of_nodes(rng, self.nodes)
        names = self._names(rng, n)
        parents = _graph(rng, names)
        order = _order(rng, parents, names[-1])
        edges = [(parent, child) for child in names for parent in parents[child]]
        rng.shuffle(edges)
        tokens = [BEGIN]
        for parent, child in edges:
            tokens += parent + child
        tokens += (self.end - 2, *names[-1], self.end - 1)
        first = len(tokens)
        tokens += [token for node in order for token in node] + [self.end]
        return next_tokens(tokens, [Answer(first, len(tokens), _depth(parents, names[-1]))])

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens[: list(tokens).index(self.end - 1) + 1])

    def accepts(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether the answer has the nodes on which the query depends, and no others, each once and after its parents."""
        at = list(prompt).index(self.end - 2)
        edges, (query,), nodes = self._split(prompt[1:at]), self._split(prompt[at + 1 : -1]), self._split(answer)
        parents: dict[Word, list[Word]] = {name: [] for name in (*edges, query)}
        for parent, child in zip(edges[::2], edges[1::2], strict=True):
            parents[child].append(parent)
        place = {node: number for number, node in enumerate(nodes)}
        same = len(nodes) == len(place) and place.keys() == set(_reached(parents, query))
        return same and all(place[parent] < place[node] for node in nodes for parent in parents[node])

    def _split(self, tokens: Sequence[int]) -> list[Word]:
        """The words in a row of tokens, the last of which may have no end."""
        if not self.symbols:
            return [(token,) for token in tokens]
        split: list[Word] = [()]
        for token in tokens:
            split[-1] += (token,)
            if token > self.symbols:
                split.append(())
        return [word for word in split if word]

    def _names(self, rng: random.Random, n: int) -> list[Word]:
        if self.symbols:
            return words(rng, n, self.symbols, self.shortest_word, self.longest_word)
        return [(token,) for token in rng.sample(range(1, self.nodes + 1), n)]


def _graph(rng: random.Random, names: Sequence[Word]) -> Parents:
    n, used = len(names), dict.fromkeys(names, 0)
    parents: dict[Word, list[Word]] = {name: [] for name in names}
    for at in range(rng.randint(1, (n - 1) // 4 + 1), n):
        free = [name for name in names[:at] if used[name] < DEGREE]  # never empty: no node depends on the one before
        parents[names[at]] = rng.sample(free, rng.randint(1, min(len(free), DEGREE)))
        for parent in parents[names[at]]:
            used[parent] += 1
    return parents


def _order(rng: random.Random, parents: Parents, query: Word) -> list[Word]:
    """`query` and the nodes on which it depends, each after its parents. The order is drawn from the end: the next node is
    one of those whose children are all placed."""
    children = dict.fromkeys(_reached(parents, query), 0)
    for node in children:
        for parent in parents[node]:
            children[parent] += 1
    ready, order = [query], []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for parent in parents[order[-1]]:
            children[parent] -= 1
            if not children[parent]:
                ready.append(parent)
    return order[::-1]


def _reached(parents: Parents, query: Word) -> list[Word]:
    reached = {query: None}
    waiting = [query]
    while waiting:
        new = [parent for parent in parents[waiting.pop()] if parent not in reached]
        reached |= dict.fromkeys(new)
        waiting += new
    return list(reached)


def _depth(parents: Parents, query: Word) -> int:
    """Edges of the shortest way from the query to a node without parents."""
    level, depth = {query}, 0
    while all(parents[node] for node in level):
        level, depth = {parent for node in level for parent in parents[node]}, depth + 1
    return depth
