"""Depo and Brevo: every answer is found again from the tokens of its sample, by other code than drew it."""

import random
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from xfresearch.data.labels import open_data_set
from xfresearch.data.tasks.node_words import number_of_nodes
from xfresearch.data.tasks.task import NO_LABEL
from xfresearch.runtime.errors import UserError


def samples(corpus: str, split: str, length: int, count: int = 60):
    """(tokens, [(answer, difficulty)]) of every whole sample. The answers are read from the labels alone."""
    examples = open_data_set(corpus, length).read(split, range(count), length)
    for row in zip(*(values_NL.tolist() for values_NL in examples), strict=True):
        for segment in range(1, max(row[2]) + 1):
            here = [at for at in range(length) if row[2][at] == segment]
            tokens, targets, _, answers, difficulty = ([values[at] for at in here] for values in row)
            if here[-1] == length - 1:
                continue  # it may be cut
            for at, target in enumerate(targets):
                assert target == NO_LABEL or target == tokens[at + 1] and answers[at] > 0
            numbers = sorted(set(answers) - {0})
            where = {number: [at for at, own in enumerate(answers) if own == number] for number in numbers}
            yield tokens, [([targets[at] for at in where[n]], difficulty[where[n][0]]) for n in numbers]


def words_of(tokens: list[int], symbols: int) -> list[tuple]:
    split, word = [], ()
    for token in tokens:
        word += (token,)
        if token > symbols:
            split.append(word)
            word = ()
    assert not word
    return split


@pytest.mark.parametrize("shortest, longest, symbols, separator", [(1, 2, 5, False), (5, 7, 3, False), (1, 2, 5, True)])
def test_depo_answers_lie_on_the_cycle(shortest, longest, symbols, separator):
    corpus = f"depo:nodes=9,hops=6,queries=4,symbols={symbols},shortest_word={shortest},longest_word={longest}"
    corpus += f",separator={separator}"
    hop, mark, length = 2 * symbols + 1, 2 * symbols + 7, open_data_set(corpus, 999).longest(0) + 1
    sizes, asked = Counter(), {"train": Counter(), "validation": Counter()}
    for split in asked:
        for tokens, answers in samples(corpus, split, length):
            questions = [at for at, token in enumerate(tokens) if hop <= token < mark]
            edges = tokens[1 : questions[0]]
            assert separator == (edges[0] == mark + 1)
            words = words_of([token for token in edges if token != mark + 1], symbols)
            assert edges.count(mark + 1) == (len(words) // 2 if separator else 0)
            after = dict(zip(words[::2], words[1::2], strict=True))
            assert len(after) == len(words) // 2 and all(shortest <= len(word) <= longest for word in words)
            sizes[split, len(after)] += 1
            assert tokens[0] == 0 and len(questions) == len(answers) == min(4, len(after))
            about = set()
            for begin, end, (answer, difficulty) in zip(questions, [*questions[1:], len(tokens)], answers, strict=True):
                k, asked_about = tokens[begin] - hop + 1, tokens[begin + 1 : tokens.index(mark, begin)]
                [first], [last] = words_of(asked_about, symbols), words_of(answer, symbols)
                word = first
                for _ in range(k):
                    word = after[word]
                assert last == word and difficulty == k and tokens[end - len(answer) : end] == list(answer)
                about.add(first)
                asked[split][k] += 1
            assert len(about) == len(questions)
            walk, word = set(), words[0]
            while word not in walk:  # it is a single cycle
                walk.add(word)
                word = after[word]
            assert walk == set(after)
    assert asked["train"].keys() == {1, 2, 3, 4, 5, 6} and asked["validation"].keys() == {1, 2, 4, 6}
    assert {n for split, n in sizes if split == "validation"} == {9} and len(sizes) > 6


def test_small_problems_are_seen_more_often():
    """n has the probability 1 / (n + sqrt N), over the sum."""
    rng, N, count = random.Random(0), 12, 4000
    drawn_N = np.bincount([number_of_nodes(rng, N) for _ in range(count)], minlength=N + 1)[3:]
    law_N = 1 / (np.arange(3, N + 1) + N**0.5)
    expected_N = count * law_N / law_N.sum()
    assert (np.abs(drawn_N - expected_N) < 4 * np.sqrt(expected_N)).all()


def is_right(edges, query, nodes) -> bool:
    """Whether `nodes` is a topological order of what `query` depends on: by removing nodes without parents."""
    needed = {query}
    while more := {parent for parent, child in edges if child in needed} - needed:
        needed |= more
    left = {edge for edge in edges if edge[1] in needed}
    for node in nodes:
        if node not in needed or any(child == node for _, child in left):
            return False
        needed.remove(node)
        left = {edge for edge in left if edge[0] != node}
    return not needed


@pytest.mark.parametrize("corpus", ["brevo:nodes=12", "brevo:nodes=12,symbols=4"])
def test_brevo_answers_are_topological_orders_of_what_the_query_needs(corpus):
    task = open_data_set(corpus, 400)
    symbols, leaves, parents_of = task.symbols, Counter(), Counter()
    for split in task.splits:
        for tokens, [(answer, depth)] in samples(corpus, split, task.longest(0) + 1):
            at, mark = tokens.index(task.end - 2), tokens.index(task.end - 1)
            assert answer[-1] == task.end == tokens[-1] and tokens[mark + 1 :] == answer
            parts = tokens[1:at], tokens[at + 1 : mark], answer[:-1]
            words, query, nodes = (words_of(part, symbols) if symbols else [(t,) for t in part] for part in parts)
            edges = list(zip(words[::2], words[1::2], strict=True))
            assert len(query) == 1 and is_right(edges, query[0], nodes) and len(set(edges)) == len(edges)
            assert nodes[-1] == query[0] and task.accepts(task.prompt(tokens), answer[:-1])
            out, into = Counter(parent for parent, _ in edges), Counter(child for _, child in edges)
            assert max(out.values()) <= 4 and max(into.values()) <= 4
            parents_of.update(into.values())
            reached, steps = {query[0]}, 0
            while all(into[node] for node in reached):
                reached, steps = {parent for parent, child in edges if child in reached}, steps + 1
            assert steps == depth
            leaves[len(set(words) - set(into))] += 1
    assert set(parents_of) == {1, 2, 3, 4} and len(leaves) > 1


def test_brevo_accepts_every_right_order_and_no_other():
    """All orders of all subsets of five nodes, of one graph with several right answers."""
    edges = [((1,), (3,)), ((2,), (3,)), ((2,), (4,)), ((3,), (5,)), ((1,), (5,))]
    task = open_data_set("brevo:nodes=5", 40)
    prompt = [0, *(token for edge in edges for node in edge for token in node), task.end - 2, 5, task.end - 1]
    right = 0
    for size in range(1, 6):
        for nodes in permutations(range(1, 6), size):
            expected = is_right(edges, (5,), [(node,) for node in nodes])
            assert task.accepts(prompt, nodes) == expected
            right += expected
    assert right == 2
    for wrong in ((), (1, 1, 2, 3, 5), (1, 2, 3, 5, 5), (1, 2, 3, 5, task.end - 1)):
        assert not task.accepts(prompt, wrong)


@pytest.mark.parametrize(
    "corpus, length, message",
    [
        ("depo:nodes=9", 40, "sequence_length=40 is not allowed: it must be at least 91, the longest sample of depo"),
        ("depo:nodes=40,symbols=4", 999, "depo.nodes=40 is not allowed: it must be at most 10, half of all words"),
        ("depo:shortest_word=3", 999, "depo.longest_word=2 is not allowed: it must be at least shortest_word=3"),
        ("brevo:nodes=999,symbols=2", 9999, "brevo.nodes=999 is not allowed: it must be at most 14, half of all words"),
        ("brevo", 512, "sequence_length=512 is not allowed: it must be at least 615, the longest sample of brevo"),
    ],
)
def test_wrong_options_are_named(corpus, length, message):
    with pytest.raises(UserError, match=message):
        open_data_set(corpus, length)
