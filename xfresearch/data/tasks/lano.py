"""`lano`: sentences of a grammar (Allen-Zhu 2025, appendix A; the grammars of Allen-Zhu and Li 2023, Physics of language
models: part 1).

A grammar has levels of three symbols; the first level has the root alone. A symbol becomes one of its rules, all with the
same probability. A rule is two or three symbols of the next level; those below the last level are the words 1, 2 and 3. A
sample is the begin 0, a sentence and the end 4. Every token is a label, and an answer of its own, of difficulty 0.

`depth` takes the last levels of a grammar alone, with the first symbol of the first of them as the root: shorter sentences.
The exact law of the data is known. `divergence` is the loss of a model minus that of the law on the same sentences: the
Kullback-Leibler divergence of the model from the law, in nats per label. At temperature 1 a model generates whole sentences,
and `accepts` says which of them the grammar has.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal

import numpy as np

from xfresearch.data.tasks.task import Answer, Examples, Sample, Task, next_tokens
from xfresearch.options.fields import option
from xfresearch.runtime.errors import require
from xfresearch.runtime.progress import stage

# Levels from the root. Symbols are separated by |, their rules by spaces; a rule names symbols of the next level by number.
# From PhysicsLM4, Copyright Meta Platforms, Inc. and affiliates, Apache License 2.0 (data-synthetic-pretrain/Lano-cfg).
GRAMMARS = {
    "cfg3f": (
        "23 213 311 22",
        "313 23 33 | 11 12 213 | 32 21 123 13",
        "33 131 21 22 | 321 23 32 | 231 311 13",
        "23 323 132 | 13 313 32 133 | 122 221 11 332",
        "233 313 133 | 22 31 311 | 131 32 223",
        "221 322 312 32 | 311 12 331 | 121 33 11",
    ),
    "cfg3j": (
        "11 21 323",
        "12 113 211 | 312 32 122 | 11 231 133",
        "221 133 12 | 222 33 323 | 31 122 131",
        "23 13 33 | 22 333 32 | 213 112 12",
        "13 31 22 | 12 321 122 | 233 11 23",
        "113 21 32 | 122 33 22 | 112 211 322",
        "12 22 332 | 31 23 112 | 321 13 32",
    ),
    "cfg3k": (
        "12 33 32",
        "31 322 33 13 | 232 233 22 12 | 32 23 113",
        "231 31 313 332 | 222 13 221 321 | 32 131 211 233",
        "32 23 323 211 | 232 311 33 | 22 31 122",
        "133 223 33 | 12 122 211 22 | 32 11 23",
        "11 22 331 131 | 213 111 121 | 12 221 313 23",
        "33 131 21 | 23 112 31 122 | 133 22 111 323",
    ),
}
BEGIN, WORDS, END = 0, (1, 2, 3), 4
SCALE = 2.3  # of the probability of each word: about e to the entropy of a word, so that long sentences do not underflow
Levels = tuple[tuple[tuple[str, ...], ...], ...]  # [level][symbol][rule]


@dataclass(frozen=True)
class Lano(Task):
    """The options of the corpus, as in `lano:grammar=cfg3k,depth=4`."""

    grammar: Literal["cfg3f", "cfg3j", "cfg3k"] = option("cfg3f", "name of the grammar")
    depth: int = option(0, "last levels of the grammar that are used; 0 for all", low=0)

    temperature = 1.0

    @property
    def vocab_size(self) -> int:
        return END + 1

    @property
    def end(self) -> int:
        return END

    @property
    def levels(self) -> Levels:
        """The rules that are used, from the root, which is symbol 0."""
        lines = GRAMMARS[self.grammar][-self.depth :]
        return tuple(tuple(tuple(symbol.split()) for symbol in line.split("|")) for line in lines)

    def longest(self, length: int) -> int:
        most = [1] * len(WORDS)
        for level in reversed(self.levels):
            most = [max(sum(most[int(child) - 1] for child in rule) for rule in rules) for rules in level]
        return most[0] + 2

    def check(self, length: int) -> None:
        levels = len(GRAMMARS[self.grammar])
        allowed = f"at most {levels}, the levels of {self.grammar}"
        require(self.depth <= levels, "data.corpus: lano.depth", self.depth, allowed)
        super().check(length)

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        symbols, tokens = [0], [BEGIN]
        for level in self.levels:
            symbols = [int(child) - 1 for symbol in symbols for child in rng.choice(level[symbol])]
        tokens += [WORDS[symbol] for symbol in symbols] + [END]
        return next_tokens(tokens, [Answer(at, at + 1, 0) for at in range(1, len(tokens))])

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        return [BEGIN]

    def accepts(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        return log_probability(self.levels, answer) > -math.inf

    def figures(self, measured: dict, parameters: int, examples: Examples) -> dict[str, float]:
        """The divergence from the exact law, in nats per label. `examples` are those of `measured`."""
        sentences = tuple(
            tuple(tokens_L[segments_L == segment][1:-1].tolist())
            for tokens_L, segments_L in zip(examples.tokens, examples.segments, strict=True)
            for segment in range(1, segments_L.max() + 1)
        )
        labels = sum(len(sentence) + 1 for sentence in sentences)
        return {"divergence": measured["loss"] + log_likelihood(self.levels, sentences) / labels}


@lru_cache(maxsize=1)  # all checkpoints of a run are measured on the same sentences
def log_likelihood(levels: Levels, sentences: tuple[tuple[int, ...], ...]) -> float:
    """The sum of the `log_probability` of all sentences."""
    total = 0.0
    with stage("probabilities of the sentences by the grammar", len(sentences), "sentences") as progress:
        for sentence in sentences:
            total += log_probability(levels, sentence)
            progress.update(1)
    return total


def log_probability(levels: Levels, sentence: Sequence[int]) -> float:
    """The logarithm of the probability of a sentence, over all its derivations; -inf if it has none.

    The inside algorithm, level by level: entry (i, j) of a symbol's matrix is the probability that it becomes the words i to
    j - 1, so that a rule's matrix is the product of those of its symbols.
    """
    n = len(sentence)
    words_N = np.asarray(sentence, int)
    inside_N1N1 = [np.diag(SCALE * (words_N == word), 1) for word in WORDS]
    for level in reversed(levels):
        below = inside_N1N1
        of_rules = [[reduce(np.matmul, [below[int(child) - 1] for child in rule]) for rule in rules] for rules in level]
        inside_N1N1 = [np.mean(products, 0) for products in of_rules]
    scaled = float(inside_N1N1[0][0, n])
    return math.log(scaled) - n * math.log(SCALE) if scaled else -math.inf
