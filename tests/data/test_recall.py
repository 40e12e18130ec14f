"""The recall task against a slow reference: every label by looking for the key in the pairs."""

import numpy as np
import pytest

from xfresearch.data.labels import open_data_set
from xfresearch.data.recall import NO_LABEL, Recall, _draw
from xfresearch.runtime.errors import UserError


def test_labels_are_the_values_of_the_keys():
    task, pairs = Recall(keys=20, values=7, samples=200), 6
    for split in task.splits:
        tokens_NL, targets_NL = task.examples(split, 3 * pairs)
        assert tokens_NL.shape == targets_NL.shape and tokens_NL.dtype == targets_NL.dtype == np.int32
        for tokens, targets in zip(tokens_NL.tolist(), targets_NL.tolist(), strict=True):
            values = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
            assert len(values) == pairs and max(values) < 20 <= min(values.values()) and max(values.values()) < 27
            assert targets == [NO_LABEL] * 2 * pairs + [values[key] for key in tokens[2 * pairs :]]
            assert sorted(tokens[2 * pairs :]) == sorted(values)


def test_keys_values_and_orders_are_drawn_evenly():
    tokens_NL, targets_NL = Recall(keys=8, values=4, samples=8000).examples("train", 12)
    for at, low, high in ((0, 0, 8), (6, 0, 8), (1, 8, 12), (7, 8, 12), (8, 0, 8)):
        counts = np.bincount(tokens_NL[:, at], minlength=12)[low:high]
        assert counts.sum() == len(tokens_NL) and np.ptp(counts) < 0.15 * counts.mean()
    # The first key that comes again was each of the four with the same chance.
    places = (tokens_NL[:, :8:2] == tokens_NL[:, 8:9]).argmax(1)
    assert np.ptp(np.bincount(places)) < 0.15 * len(places) / 4


def test_the_data_depend_on_their_seed_alone():
    first = Recall(samples=50).examples("train", 24)
    _draw.cache_clear()
    again, other = Recall(samples=50).examples("train", 24), Recall(samples=50, seed=1).examples("train", 24)
    assert all((a == b).all() for a, b in zip(first, again, strict=True)) and (first[0] != other[0]).any()
    assert [len(Recall(samples=50).examples(split, 24)[0]) for split in ("train", "validation")] == [40, 10]


@pytest.mark.parametrize(
    "corpus, length, message",
    [
        ("recall", 25, "config.sequence_length=25 is not allowed: it must be a multiple of 3"),
        ("recall:keys=7", 24, "recall.keys=7 is not allowed: it must be at least 8, the pairs of a sequence of 24 tokens"),
        ("recall:pairs=7", 24, "pairs"),
    ],
)
def test_wrong_options_are_named(corpus, length, message):
    with pytest.raises(UserError, match=message):
        open_data_set(corpus, length)
