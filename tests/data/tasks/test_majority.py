"""The Majority task against a slow reference: partitions by enumeration, labels by counting."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from xfresearch.data.tasks.majority import Majority, _draw, _partition, _table, number_of_partitions

LENGTH = 12


def partitions(total: int, parts: int, largest: int | None = None):
    """All partitions of `total` into at most `parts` parts, each at most `largest`, in descending order."""
    if total == 0:
        yield ()
    elif parts:
        for first in range(min(total, largest or total), 0, -1):
            for rest in partitions(total - first, parts - 1, first):
                yield (first, *rest)


def with_margin(length: int, classes: int, margin: int) -> set:
    return {p for p in partitions(length, classes) if len(p) > 1 and p[0] - p[1] >= margin}


def counts(sequence) -> tuple:
    """The counts of the classes of a sequence, in descending order."""
    return tuple(sorted(Counter(sequence).values(), reverse=True))


def both(task: Majority, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, targets) of each split, drawn without the cache, as in another process."""
    _draw.cache_clear()
    examples = [task.read(split, range(task.size(split, length)), length) for split in task.splits]
    return [(each.tokens, each.targets) for each in examples]


@pytest.mark.parametrize(
    "length, classes, margin", [(12, 5, 3), (12, 5, 1), (9, 20, 2), (7, 2, 1), (6, 3, 4), (50, 4, 6)]
)
def test_every_partition_has_one_rank(length, classes, margin):
    expected = with_margin(length, classes, margin)
    assert number_of_partitions(length, classes, margin) == len(expected)
    listed = [
        _partition(rank, length - margin, classes) for rank in range(_table(length - margin, classes)[classes][-1])
    ]
    assert listed[0] == [length - margin] + [0] * (classes - 1)  # a single part; it is never drawn
    listed = [tuple(part + margin * (i == 0) for i, part in enumerate(p) if part + margin * (i == 0)) for p in listed[1:]]
    assert set(listed) == expected and len(listed) == len(expected)


def test_number_of_partitions_of_the_published_task():
    assert number_of_partitions(50, 20, 6) == len(with_margin(50, 20, 6)) == 69_413


def test_labels_are_the_most_frequent_class():
    for tokens_NL, targets_NL in both(Majority(samples=400), 50):
        assert tokens_NL.shape == targets_NL.shape and tokens_NL.dtype == targets_NL.dtype == np.int32
        for tokens_L, targets_L in zip(tokens_NL.tolist(), targets_NL.tolist(), strict=True):
            (label, most), (_, second) = Counter(tokens_L).most_common(2)
            assert targets_L == [label] * 50 and most - second >= 6
            assert set(tokens_L) <= set(range(20))


def test_each_partition_is_in_one_split_with_all_its_sequences():
    task = Majority(classes=5, samples=4 * number_of_partitions(LENGTH, 5, 3), per_partition=4, margin=3)
    train, validation = ([counts(tokens_L) for tokens_L in tokens_NL.tolist()] for tokens_NL, _ in both(task, LENGTH))
    assert not set(train) & set(validation)
    assert set(Counter(train + validation).values()) == {4}  # no partition is drawn twice
    assert set(train + validation) == with_margin(LENGTH, 5, 3)
    assert len(train) == 4 * round(0.8 * len(set(train + validation)))


def test_both_splits_have_at_least_one_partition():
    for partitions_drawn in (2, 3):
        task = Majority(classes=5, samples=partitions_drawn, per_partition=1, margin=3)
        assert [len(tokens_NL) for tokens_NL, _ in both(task, LENGTH)] == [partitions_drawn - 1, 1]


def test_data_depend_on_the_seed_and_are_reproducible():
    first, again, other = (both(Majority(samples=400, seed=seed), 50) for seed in (0, 0, 1))
    for (tokens_NL, targets_NL), same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(tokens_NL, same[0])
        assert not np.array_equal(tokens_NL, different[0]) and not np.array_equal(targets_NL, different[1])


def test_data_are_those_measured_in_the_docs():
    """A new version of Python or NumPy may change its generator. Then docs/playground.md measured other data."""
    (tokens_NL, _), _ = both(Majority(samples=400), 50)
    assert hashlib.sha256(np.ascontiguousarray(tokens_NL, "<i4").tobytes()).hexdigest()[:16] == "6e8e0d97ca9090fe"


def test_label_is_independent_of_class_and_position():
    tokens_NL, targets_NL = both(Majority(samples=20_000), 50)[0]
    labels_N = targets_NL[:, 0]
    shares_C = np.bincount(labels_N, minlength=20) / len(labels_N)
    assert np.abs(shares_C - 1 / 20).max() < 4 * (0.05 * 0.95 / len(labels_N)) ** 0.5  # 4 standard errors
    at_L = (tokens_NL == targets_NL).mean(0)
    assert np.abs(at_L - at_L.mean()).max() < 4 * 0.5 / len(labels_N) ** 0.5
    copies = (tokens_NL[:, -1] == labels_N).mean()
    assert 0.3 < copies < 0.45  # 1 in the published code, which sorts the tokens
