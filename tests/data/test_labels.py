"""Labelled data sets in the pipeline: batches, vocabulary, errors, and a data set added as one class."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from tests.contracts.variants import ROOT
from xfresearch.data import labels
from xfresearch.data.pipeline import Batches, evaluation_batches, prepare
from xfresearch.data.tasks.task import NO_LABEL, Labelled, one_label_each
from xfresearch.options.fields import option
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError

TINY = f"--config={ROOT}/configs/brody_majority.py:tiny"


def config_with(*overrides: str):
    return parse([TINY, *(f"--config.{override}" for override in overrides)])


@dataclass(frozen=True)
class Parity(Labelled):
    """Sequences of two bits. The label of the second is whether both are equal; the first has no label."""

    copies: int = option(3, "copies of each of the four sequences", low=1)

    @property
    def vocab_size(self):
        return 2

    def check(self, length: int) -> None:
        if length != 2:
            raise UserError("only two")

    def size(self, split, length):
        return 4 * self.copies

    def read(self, split, indices, length):
        tokens_NL = np.array([[a, b] for a in (0, 1) for b in (0, 1)] * self.copies)[np.asarray(indices, int)]
        labels_N = (tokens_NL[:, 0] == tokens_NL[:, 1]).astype(int)
        return one_label_each(tokens_NL, np.stack([np.full(len(tokens_NL), NO_LABEL), labels_N], 1))


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.setitem(labels.DATA_SETS, "parity", f"{__name__}:Parity")
    return config_with("data.corpus=('parity:copies=2',)", "sequence_length=2", "batch_size=4")


def test_new_data_set_needs_a_class_and_a_line(parity):
    assert parity.model.vocab_size == 2 and len(prepare(parity, "train")) == 8
    batch = Batches(parity).batch(0)
    assert {name: (values.dtype.name, values.shape) for name, values in batch.items()} == {
        **{name: ("int32", (4, 2)) for name in ("tokens", "targets", "segments", "positions")},
        "weights": ("float32", (4, 2)),
    }
    np.testing.assert_array_equal(batch["weights"], [[0, 1]] * 4)
    np.testing.assert_array_equal(batch["targets"][:, 1], batch["tokens"][:, 0] == batch["tokens"][:, 1])
    assert batch["targets"].min() == 0  # -1 would not be a valid index for the loss
    np.testing.assert_array_equal(batch["positions"], [[0, 1]] * 4)
    assert (batch["segments"] == 1).all()


def test_an_epoch_has_every_sequence_once_in_an_order_set_by_the_seed(parity):
    def epoch(seed):
        batches = Batches(parity, seed=seed)
        return [tuple(row) for step in (0, 1) for row in batches.batch(step)["tokens"].tolist()]

    assert set(Counter(epoch(0)).values()) == {2}
    assert epoch(0) == epoch(0) and any(epoch(0) != epoch(seed) for seed in (1, 2, 3))


def test_last_evaluation_batch_is_padded_with_weight_0(parity):
    batches = list(evaluation_batches(prepare(parity, "validation"), 3))
    assert [int(batch["weights"].sum()) for batch in batches] == [3, 3, 2]


def test_vocabulary_size_is_the_number_of_classes_or_larger():
    assert config_with().model.vocab_size == 8
    assert config_with("model.vocab_size=10").model.vocab_size == 10


def test_a_causal_model_may_train_on_labels_too():
    assert config_with("model.causal=True").model.causal


TEXT_ONLY = "which has labels and no text"
MISTAKES = [
    (["data.corpus=('majority','python_stdlib')"], r"config.data.corpus=\('majority', 'python_stdlib'\) .* a single corpus"),
    (
        ["data.tokenizer=bpe"],
        f"config.data.tokenizer='bpe'.* left at 'bytes' with .*, {TEXT_ONLY}",
    ),
    (["data.packing=documents"], f"config.data.packing='documents' .* left at 'stream' .* {TEXT_ONLY}"),
    (["data.text_field=story"], f"config.data.text_field='story' .* left at 'text' .* {TEXT_ONLY}"),
    (["data.manual_dir=x"], f"config.data.manual_dir='x' .* left at '' .* {TEXT_ONLY}"),
    (["data.workers=2"], f"config.data.workers=2 .* left at 0 .* {TEXT_ONLY}"),
    (["data.weights=(2.0,)"], rf"config.data.weights=\(2.0,\) .* left at \(\) .* {TEXT_ONLY}"),
    (["log.sample=a"], f"config.log.sample='a' .* left at '' .* {TEXT_ONLY}"),
    (
        ["model.vocab_size=7"],
        "config.model.vocab_size=7 .* 0 or at least 8, the classes of data.corpus='majority:classes=8",
    ),
    (["data.corpus=('majority:classes',)"], "data.corpus='majority:classes' .* of the form majority:OPTION=VALUE"),
    (["data.corpus=('majority:class=3',)"], "majority.class=3: there is no such key; did you mean 'classes'?"),
    (["data.corpus=('majority:classes=1',)"], "majority.classes=1.* at least 2"),
    (["data.corpus=('majority:classes=ten',)"], "majority.classes='ten' has the wrong type str: it must be an integer"),
    (
        ["data.corpus=('majority:margin=23',)"],
        "majority.margin=23 .* smaller: sequences of 24 tokens have 0 partitions",
    ),
    (
        ["data.corpus=('majority:samples=105',)"],
        "majority.samples=105 .* a multiple of per_partition=10, at least 20",
    ),
    (
        ["data.corpus=('majority:samples=10',)"],
        "majority.samples=10 .* a multiple of per_partition=10, at least 20",
    ),
    (["data.corpus=('majority:margin=20',)"], "majority.samples=100000 .* at most 40: sequences of 24 tokens have 4"),
    (
        ["data.corpus=('python_stdlib',)"],
        "config.model.causal=False .* True to train on next tokens: .* learns nothing",
    ),
]


@pytest.mark.parametrize("overrides, message", MISTAKES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_invalid_options_raise_a_one_line_error(overrides, message):
    with pytest.raises(UserError, match=message) as raised:
        config_with(*overrides)
    assert "\n" not in str(raised.value)


def test_unknown_split_is_an_error():
    with pytest.raises(UserError, match=r"corpus 'majority:.*' has no split 'test'; it has: train, validation"):
        prepare(config_with(), "test")
