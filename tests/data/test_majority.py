"""The Majority task against a slow construction of its own: partitions listed one by one, labels by counting."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from xfresearch.data.majority import Majority, _draw, _partition, _table, number_of_partitions

LENGTH = 12


def partitions(total: int, parts: int, largest: int | None = None):
    """All ways to write `total` as at most `parts` parts in descending order, none above `largest`."""
    if total == 0:
        yield ()
    elif parts:
        for first in range(min(total, largest or total), 0, -1):
            for rest in partitions(total - first, parts - 1, first):
                yield (first, *rest)


def with_margin(length: int, classes: int, margin: int) -> set:
    return {p for p in partitions(length, classes) if len(p) > 1 and p[0] - p[1] >= margin}


def counts(sequence) -> tuple:
    """How often its classes stand in a sequence, in descending order."""
    return tuple(sorted(Counter(sequence).values(), reverse=True))


def both(task: Majority, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, targets) of each split, drawn anew as in another process."""
    _draw.cache_clear()
    return [task.examples(split, length) for split in task.splits]


@pytest.mark.parametrize(
    "length, classes, margin", [(12, 5, 3), (12, 5, 1), (9, 20, 2), (7, 2, 1), (6, 3, 4), (50, 4, 6)]
)
def test_every_partition_has_a_number(length, classes, margin):
    expected = with_margin(length, classes, margin)
    assert number_of_partitions(length, classes, margin) == len(expected)
    found = [
        _partition(rank, length - margin, classes) for rank in range(_table(length - margin, classes)[classes][-1])
    ]
    assert found[0] == [length - margin] + [0] * (classes - 1)  # the one that is never drawn
    found = [tuple(part + margin * (i == 0) for i, part in enumerate(p) if part + margin * (i == 0)) for p in found[1:]]
    assert set(found) == expected and len(found) == len(expected)


def test_the_published_size():
    assert number_of_partitions(50, 20, 6) == len(with_margin(50, 20, 6)) == 69_413


def test_labels_are_the_majority_by_counting():
    for tokens_NL, targets_NL in both(Majority(samples=400), 50):
        assert tokens_NL.shape == targets_NL.shape and tokens_NL.dtype == targets_NL.dtype == np.int32
        for tokens_L, targets_L in zip(tokens_NL.tolist(), targets_NL.tolist(), strict=True):
            (label, most), (_, second) = Counter(tokens_L).most_common(2)
            assert targets_L == [label] * 50 and most - second >= 6
            assert set(tokens_L) <= set(range(20))


def test_no_partition_is_in_both_splits_and_each_has_its_sequences():
    task = Majority(classes=5, samples=4 * number_of_partitions(LENGTH, 5, 3), per_partition=4, margin=3)
    train, validation = ([counts(tokens_L) for tokens_L in tokens_NL.tolist()] for tokens_NL, _ in both(task, LENGTH))
    assert not set(train) & set(validation)
    assert set(Counter(train + validation).values()) == {4}  # none twice
    assert set(train + validation) == with_margin(LENGTH, 5, 3)
    assert len(train) == 4 * round(0.8 * len(set(train + validation)))


def test_both_splits_have_a_partition():
    for partitions_drawn in (2, 3):
        task = Majority(classes=5, samples=partitions_drawn, per_partition=1, margin=3)
        assert [len(tokens_NL) for tokens_NL, _ in both(task, LENGTH)] == [partitions_drawn - 1, 1]


def test_the_same_options_are_the_same_data_and_another_seed_is_not():
    first, again, other = (both(Majority(samples=400, seed=seed), 50) for seed in (0, 0, 1))
    for (tokens_NL, targets_NL), same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(tokens_NL, same[0])
        assert not np.array_equal(tokens_NL, different[0]) and not np.array_equal(targets_NL, different[1])


def test_the_data_are_those_of_the_figures_in_the_docs():
    """Python's and NumPy's generators may change with their versions: then docs/majority.md is of other data."""
    (tokens_NL, _), _ = both(Majority(samples=400), 50)
    assert hashlib.sha256(np.ascontiguousarray(tokens_NL, "<i4").tobytes()).hexdigest()[:16] == "6e8e0d97ca9090fe"


def test_neither_the_class_nor_the_place_gives_the_label_away():
    tokens_NL, targets_NL = Majority(samples=20_000).examples("train", 50)
    labels_N = targets_NL[:, 0]
    shares_C = np.bincount(labels_N, minlength=20) / len(labels_N)
    assert np.abs(shares_C - 1 / 20).max() < 4 * (0.05 * 0.95 / len(labels_N)) ** 0.5  # 4 standard errors
    at_L = (tokens_NL == targets_NL).mean(0)
    assert np.abs(at_L - at_L.mean()).max() < 4 * 0.5 / len(labels_N) ** 0.5
    copies = (tokens_NL[:, -1] == labels_N).mean()
    assert 0.3 < copies < 0.45  # the published sequences are sorted: 1
