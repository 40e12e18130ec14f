"""Mano, Lano and Capo against slow references: another evaluator, all derivations of a grammar, a code for people."""

import math
from collections import Counter, defaultdict
from functools import cache
from itertools import product

import numpy as np
import pytest

from xfresearch.data.labels import open_data_set
from xfresearch.data.tasks import capo, lano
from xfresearch.data.tasks.lano import GRAMMARS, log_probability
from xfresearch.data.tasks.task import NO_LABEL
from xfresearch.runtime.errors import UserError


def rows(corpus: str, split: str, length: int, count: int = 60) -> list[list[list[int]]]:
    """[tokens, targets, answers, difficulty] of each whole sample, as lists."""
    examples = open_data_set(corpus, length).read(split, range(count), length)
    parts = []
    for row in zip(*examples, strict=True):
        for segment in range(1, row[2].max() + 1):
            here = row[2] == segment
            if not here[-1]:
                parts.append([row[field][here].tolist() for field in (0, 1, 3, 4)])
    return parts


def value_of(expression: list[int], modulus: int) -> int:
    """The value of a prefix expression, read from its end with a stack."""
    stack = []
    for token in reversed(expression):
        if token >= modulus:
            a, b = stack.pop(), stack.pop()
            token = {0: a + b, 1: a - b, 2: a * b}[(token - modulus) // 2]
        stack.append(token)
    [value] = stack
    return value % modulus


def test_mano_values_are_those_of_the_expressions():
    names, operations = Counter(), {"train": Counter(), "validation": Counter()}
    for split in operations:
        for tokens, targets, answers, difficulty in rows("mano:operations=4", split, 40):
            begin, length, *expression, mark, value = tokens
            count = (length - 23 - 6) // 2 + 1
            assert len(expression) == 2 * count + 1 and (mark - 23 - 6 - 8) // 2 + 1 == count
            assert value == value_of(expression, 23) < 23 and begin - 23 - 6 - 16 in (0, 1)
            labels = [*tokens[1:], NO_LABEL] if split == "train" else [*[NO_LABEL] * (len(tokens) - 2), value, NO_LABEL]
            assert targets == labels and answers[-2] > 0 and sum(number > 0 for number in answers) == 1
            assert difficulty[-2] == count
            operations[split][count] += 1
            names.update(tokens)
    assert operations["train"].keys() == {1, 2, 3, 4} and operations["validation"].keys() == {4}
    assert len(names) == 23 + 6 + 8 + 8 + 2 == open_data_set("mano:operations=4", 40).vocab_size


def test_mano_expressions_have_the_law_of_the_paper():
    """The first part of an expression of three operations has 0, 1 or 2 with the same probability."""

    def end_of(expression: list[int], begin: int) -> int:
        return begin + 1 if expression[begin] < 23 else end_of(expression, end_of(expression, begin + 1))

    sizes = Counter(
        (end_of(tokens[2:-2], 1) - 2) // 2 for tokens, *_ in rows("mano:operations=3", "validation", 34, 600)
    )
    assert sizes.keys() == {0, 1, 2} and max(sizes.values()) - min(sizes.values()) < 4 * math.sqrt(1800 / 3)


def derivations(levels, symbol: int = 0, level: int = 0) -> dict[str, float]:
    """{sentence: its probability}, by writing out every derivation."""
    if level == len(levels):
        return {str(symbol + 1): 1.0}
    total = defaultdict(float)
    rules = levels[level][symbol]
    for rule in rules:
        for parts in product(*(derivations(levels, int(child) - 1, level + 1).items() for child in rule)):
            total["".join(text for text, _ in parts)] += math.prod(p for _, p in parts) / len(rules)
    return total


@pytest.mark.parametrize("corpus", ["lano:depth=2", "lano:grammar=cfg3k,depth=2"])
def test_lano_law_is_that_of_all_derivations(corpus):
    levels = open_data_set(corpus, 99).levels
    law = derivations(levels)
    assert sum(law.values()) == pytest.approx(1)
    for text, probability in law.items():
        assert log_probability(levels, [*map(int, text)]) == pytest.approx(math.log(probability), rel=1e-12)
    if corpus == "lano:depth=2":  # every other sentence of up to 6 words is refused
        texts = ["".join(words) for n in range(7) for words in product("123", repeat=n)]
        assert {text for text in texts if log_probability(levels, [*map(int, text)]) > -math.inf} == {
            text for text in law if len(text) <= 6
        }
        assert len(law) > 20


def test_lano_sentences_have_the_law():
    task = open_data_set("lano:depth=2", 12)
    law = derivations(task.levels)
    drawn = Counter("".join(map(str, tokens[1:-1])) for tokens, *_ in rows("lano:depth=2", "validation", 12, 3000))
    assert drawn.keys() <= law.keys() and drawn.total() == 3000
    misfit = sum((drawn[text] - 3000 * p) ** 2 / (3000 * p) for text, p in law.items())
    assert misfit < len(law) - 1 + 5 * math.sqrt(2 * (len(law) - 1))  # chi-squared


def parse_probability(levels, words: tuple) -> float:
    """The probability of a sentence by recursion over spans, for long ones."""

    @cache
    def inside(level: int, symbol: int, i: int, j: int) -> float:
        if level == len(levels):
            return float(j == i + 1 and words[i] == symbol + 1)
        if not 2 ** (len(levels) - level) <= j - i <= 3 ** (len(levels) - level):
            return 0.0
        rules = levels[level][symbol]
        return sum(of_rule(level + 1, rule, i, j) for rule in rules) / len(rules)

    @cache
    def of_rule(level: int, rule: str, i: int, j: int) -> float:
        first, rest = int(rule[0]) - 1, rule[1:]
        if not rest:
            return inside(level, first, i, j)
        return sum(inside(level, first, i, k) * of_rule(level, rest, k, j) for k in range(i + 1, j))

    return inside(0, 0, 0, len(words))


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammars_have_sentences_and_no_random_words(grammar):
    rules = [rule for line in GRAMMARS[grammar] for rule in line.replace("|", " ").split()]
    assert all(len(rule) in (2, 3) and set(rule) <= set("123") for rule in rules)
    for line in GRAMMARS[grammar]:
        symbols = [symbol.split() for symbol in line.split("|")]
        assert len(set(sum(symbols, []))) == len(sum(symbols, [])) and {3, 4} >= set(map(len, symbols))
    task = open_data_set(f"lano:grammar={grammar},depth=4", 300)
    [tokens, targets, answers, _] = rows(f"lano:grammar={grammar},depth=4", "validation", 300, 1)[0]
    assert targets == [*tokens[1:], NO_LABEL] and answers == [*range(1, len(tokens)), 0]
    sentence = tokens[1:-1]
    expected = parse_probability(task.levels, tuple(sentence))
    assert log_probability(task.levels, sentence) == pytest.approx(math.log(expected), rel=1e-9)
    assert task.accepts([0], sentence) and not task.accepts([0], sentence[:-1])
    shuffled = np.random.default_rng(0).permutation(sentence).tolist()
    assert not task.accepts([0], shuffled) and parse_probability(task.levels, tuple(shuffled)) == 0


def test_lano_divergence_of_the_law_itself_is_zero():
    task = open_data_set("lano:depth=3", 60)
    examples = task.read("validation", range(20), 60)
    nll, labels = 0.0, int((examples.targets != NO_LABEL).sum())
    for tokens, *_ in rows("lano:depth=3", "validation", 60, 20):
        nll -= math.log(parse_probability(task.levels, tuple(tokens[1:-1])))
    assert task.figures({"loss": nll / labels}, 0, examples)["divergence"] == pytest.approx(0, abs=1e-12)
    assert task.figures({"loss": nll / labels + 0.25}, 0, examples)["divergence"] == pytest.approx(0.25)


def test_the_law_is_computed_once_for_all_checkpoints(monkeypatch, capsys):
    task = open_data_set("lano:depth=3", 60)
    counted, per_sentence = [], lano.log_probability
    monkeypatch.setattr(lano, "log_probability", lambda *given: counted.append(given) or per_sentence(*given))
    found = [task.figures({"loss": 1.0}, 0, task.read("validation", range(20, 26), 60)) for _ in range(3)]
    assert found[0] == found[1] == found[2] and len(counted) == 6 * (60 // task.longest(60))
    assert capsys.readouterr().err.count("probabilities of the sentences by the grammar") == 1
    other = task.figures({"loss": 1.0}, 0, task.read("validation", range(26, 32), 60))
    assert other != found[0] and len(counted) == 12 * (60 // task.longest(60))


def test_capo_people_keep_their_values_and_change_their_templates():
    corpus, length = "capo:people=7,templates=3", 37
    people, templates, names = {}, Counter(), set()
    for split in ("train", "validation"):
        for tokens, targets, answers, difficulty in rows(corpus, split, length):
            places = [1, 2, 3, 5, 6, 7, 9, 11, 13, 15, 17]
            values = [tokens[at] for at in places]
            assert people.setdefault(tuple(values[:3]), values) == values
            assert tokens[0] == 0 and max(tokens) < 1 + 400 + 400 + 1000 + 12 + 28 + 200 + 200 + 300 + 100 + 263 + 18
            if split == "validation":
                assert [target for target in targets if target != NO_LABEL] == values
                assert [level for level in difficulty if level] == [1, 1, 1, 2, 3, 4, 5, 6] and not any(answers[:4])
            else:
                assert targets == [*tokens[1:], NO_LABEL]
            templates[tuple(tokens[at] for at in (4, 8, 10, 12, 14, 16))] += 1
            names.update(tokens[at] for at in (4, 8))
    assert len(people) == 7 and len(templates) > 50 and len(names) == 6
    employers = {values[9]: values[10] for values in people.values()}
    assert all(values[10] == employers[values[9]] for values in people.values())


def test_capo_bits_are_those_that_a_model_saves_against_a_code_of_the_lists():
    """A model that knows nothing spends log(values) on each label, one that knows all log(people) on the name alone."""
    task = open_data_set("capo:people=64", 36)
    fields = (400, 400, 1000, 12, 28, 200, 200, 300, 100, 263)
    # It knows the lists, and that the city follows from the employer.
    uniform = sum(map(math.log, fields))
    assert task.figures({"loss": uniform / 11}, 100, None)["bits_per_person"] == pytest.approx(0, abs=1e-9)
    whole = task.figures({"loss": math.log(64) / 11}, 100, None)
    assert whole["bits_per_person"] == pytest.approx(math.log2(math.prod(fields) / 64))
    assert whole["bits_per_parameter"] == pytest.approx(64 * math.log2(math.prod(fields) / 64) / 100)


def test_capo_names_are_the_people_alone_and_the_law_of_values_is_uniform():
    people_NF = capo._people(0, 3000)
    assert len(np.unique(people_NF[:, :3], axis=0)) == 3000
    for field, size in enumerate((400, 400, 1000, 12, 28, 200, 200, 300, 100, 263)):
        counts = np.bincount(people_NF[:, field], minlength=size)
        assert len(counts) == size and np.square(counts - 3000 / size).sum() * size / 3000 < size + 5 * math.sqrt(2 * size)


@pytest.mark.parametrize(
    "corpus, length, message",
    [
        ("mano", 24, "sequence_length=24 is not allowed: it must be at least 25, the longest sample of mano"),
        ("lano", 512, "sequence_length=512 is not allowed: it must be at least 731, the longest sample of lano"),
        ("lano:grammar=cfg3x", 512, "cfg3x"),
        ("lano:depth=7", 999, "lano.depth=7 is not allowed: it must be at most 6, the levels of cfg3f"),
        ("capo:people=0", 99, "people"),
    ],
)
def test_wrong_options_are_named(corpus, length, message):
    with pytest.raises(UserError, match=message):
        open_data_set(corpus, length)
