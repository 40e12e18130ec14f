"""The recall task against a slow reference: every label by looking for the key in the pairs."""

import numpy as np
import pytest

from xfresearch.data.labels import open_data_set
from xfresearch.data.tasks.recall import Recall
from xfresearch.data.tasks.task import NO_LABEL
from xfresearch.runtime.errors import UserError


@pytest.mark.parametrize("length, pairs", [(18, 0), (40, 6), (18, 6)])
def test_labels_are_the_values_of_the_keys(length, pairs):
    task, P = Recall(keys=20, values=7, pairs=pairs), 6
    for split in task.splits:
        examples = task.read(split, range(100), length)
        for tokens, targets, _, answers, difficulty in zip(*(values_NL.tolist() for values_NL in examples), strict=True):
            values = dict(zip(tokens[: 2 * P : 2], tokens[1 : 2 * P : 2], strict=True))
            assert len(values) == P and max(values) < 20 <= min(values.values()) and max(values.values()) < 27
            # The keys of the pairs, and no others, come again. Tokens between them are values.
            assert sorted(token for token in tokens[2 * P :] if token < 20) == sorted(values)
            labels = [values.get(token, NO_LABEL) for token in tokens[2 * P :]]
            assert targets == [NO_LABEL] * 2 * P + labels and max(tokens) < task.vocab_size
            labelled = [target != NO_LABEL for target in targets]
            assert [number for number, here in zip(answers, labelled, strict=True) if here] == [*range(1, P + 1)]
            assert [number > 0 for number in answers] == labelled and set(difficulty) == {0, P}
        assert (examples.segments == 1).all()


def test_keys_values_and_orders_are_drawn_evenly():
    tokens_NL = Recall(keys=8, values=4).read("train", range(4000), 12).tokens
    for at, low, high in ((0, 0, 8), (6, 0, 8), (1, 8, 12), (7, 8, 12), (8, 0, 8)):
        counts = np.bincount(tokens_NL[:, at], minlength=12)[low:high]
        assert counts.sum() == len(tokens_NL) and np.ptp(counts) < 0.2 * counts.mean()
    # The first key that comes again was each of the four with the same chance.
    places = (tokens_NL[:, :8:2] == tokens_NL[:, 8:9]).argmax(1)
    assert np.ptp(np.bincount(places)) < 0.2 * len(places) / 4


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_the_first_place_is_drawn_with_its_probability(power):
    """With one pair, place i of 6 has the probability i^(power - 1) over the sum."""
    targets_NL = Recall(keys=8, values=4, pairs=1, power=power).read("train", range(4000), 8).targets
    counts_6 = (targets_NL != NO_LABEL).sum(0)[2:]
    weights_6 = np.arange(1, 7) ** (power - 1)
    expected_6 = 4000 * weights_6 / weights_6.sum()
    assert (np.abs(counts_6 - expected_6) < 4 * np.sqrt(expected_6)).all()


@pytest.mark.parametrize(
    "corpus, length, message",
    [
        ("recall", 25, "config.sequence_length=25 is not allowed: it must be a multiple of 3"),
        ("recall:keys=7", 24, "recall.keys=7 is not allowed: it must be at least 8, the pairs of a sequence of 24 tokens"),
        ("recall:pairs=9", 24, "recall.pairs=9 is not allowed: it must be at most 8, for sequences of 24 tokens"),
        ("recall:samples=7", 24, "samples"),
    ],
)
def test_wrong_options_are_named(corpus, length, message):
    with pytest.raises(UserError, match=message):
        open_data_set(corpus, length)
