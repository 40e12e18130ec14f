"""Prefixes: each text comes back, each length is equally likely, and a row fits. In rows of a single stack, the tokens after
a prefix are predicted."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from xfresearch.data.objectives.prefix import Prefix, RowPrefix
from xfresearch.data.pipeline import Batches
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.options.objectives import Prefix as Options
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.training.hyperparameters import without_hyper
from xfresearch.training.program import BATCH, batch_shapes

END = 256


def test_every_length_of_a_prefix_is_equally_likely():
    made, rng = Prefix.of(Options(), ByteTokenizer(), 9, 8), np.random.default_rng(0)
    pairs = [made.pair(np.arange(8), rng) for _ in range(7000)]
    assert all([*source[:-1], *target[:-1]] == list(range(8)) for source, target in pairs)
    assert {int(ids[-1]) for pair in pairs for ids in pair} == {END}
    counts = Counter(len(source) - 1 for source, _ in pairs)
    assert set(counts) == set(range(1, 8)) and all(abs(count - 1000) < 5 * np.sqrt(1000) for count in counts.values())


def test_batches_hold_the_text_once_and_draw_anew_every_epoch(make_config, text_dir):
    text = "".join(f"{i:04d}," for i in range(60))
    config = make_config(sequence_length=12, corpus=text_dir({"a.txt": text}), objective=Options(), batch_size=1)
    batches = Batches(replace(config, source_length=13))
    count = len(batches.corpora[0])
    seen = [batches.batch(step) for step in range(2 * count)]
    sources = [tuple(batch["source"][batch["source_segments"] > 0][:-1]) for batch in seen]
    texts = [(*source, *batch["targets"][batch["segments"] > 0][:-1]) for source, batch in zip(sources, seen, strict=True)]
    assert all(len(each) == 12 for each in texts) and sorted(texts[:count]) == sorted(texts[count:])
    assert len(set(sources)) > 1.5 * count and all(batch["tokens"][0, 0] == END for batch in seen)


def test_a_decoder_that_is_too_short_is_refused():
    with pytest.raises(UserError, match="sequence_length=7 is not allowed: it must be at least 8, the longest target with"):
        Prefix.of(Options(), ByteTokenizer(), 9, 7)


def test_prefixes_of_a_fixed_length_fill_both_sides(make_config, text_dir):
    text = "".join(f"{i:04d}," for i in range(60))
    corpus, objective = text_dir({"a.txt": text}), Options(lengths="fixed")
    config = make_config(sequence_length=4, corpus=corpus, objective=objective, batch_size=1)
    batches = Batches(replace(config, source_length=7))
    for step in range(len(batches.corpora[0])):
        batch = batches.batch(step)
        whole = bytes([*batch["source"][0, :-1].tolist(), *batch["targets"][0, :-1].tolist()])
        assert len(whole) == 9 and whole in text.encode()
        assert batch["source"][0, -1] == batch["targets"][0, -1] == END and batch["weights"].all()
    made = Prefix.of(Options(lengths="fixed"), ByteTokenizer(), 7, 4)
    source, target = made.pair(np.arange(3), np.random.default_rng(0))  # the last text of a corpus may be short
    assert source.tolist() == [0, 1, END] and target.tolist() == [2, END]
    with pytest.raises(UserError, match="data.objective.lengths='fixed' is not allowed: it must be 'random' without an enc"):
        Batches(config)


def test_rows_of_a_single_stack_predict_what_follows_each_prefix():
    """Documents of 5, 1 and 4 tokens and padding: the last token of a prefix predicts the first one after it."""
    segments_L = np.repeat([1, 2, 3, 0], [5, 1, 4, 2]).astype(np.int32)
    count, rng = 4000, np.random.default_rng(0)
    rows = {"segments": np.tile(segments_L, (count, 1)), "tokens": rng.integers(9, size=(count, 12))}
    rows["weights"] = np.tile(np.isin(np.arange(12), (4, 5, 9, 10, 11), invert=True), (count, 1)).astype(np.float32)
    batch = RowPrefix()(rows, [rng] * count)
    assert batch["tokens"] is rows["tokens"] and rows["weights"].sum() == 7 * count
    for first, size in ((0, 5), (6, 4)):
        prefix_BL, weights_BL = (batch[name][:, first : first + size] for name in ("prefix", "weights"))
        lengths_B = prefix_BL.sum(1)
        np.testing.assert_array_equal(prefix_BL, np.arange(size) < lengths_B[:, None])
        after_BL = (np.arange(size) >= lengths_B[:, None] - 1) & (np.arange(size) < size - 1)
        np.testing.assert_array_equal(weights_BL > 0, after_BL)
        counts, expected = Counter(lengths_B.tolist()), count / (size - 1)
        assert set(counts) == set(range(1, size)) and all(abs(n - expected) < 5 * count**0.5 for n in counts.values())
    assert not batch["prefix"][:, [5, 10, 11]].any() and not batch["weights"][:, [5, 10, 11]].any()


def test_batches_of_a_single_stack_draw_anew_every_epoch_and_held_out_rows_are_the_same(make_config, text_dir):
    corpus = text_dir({"a.txt": "0123456789" * 60})
    config = make_config(sequence_length=12, corpus=corpus, objective=Options(), batch_size=2)
    batches = Batches(config)
    per_epoch = len(batches.corpora[0]) // 2
    first, again, later = (batches.batch(step)["prefix"] for step in (0, 0, per_epoch))
    assert np.array_equal(first, again) and not np.array_equal(first, later) and first.shape == (2, 12)
    split = batches.corpora[0]
    np.testing.assert_array_equal(split.read([0, 1])["prefix"], split.read([0, 1])["prefix"])


def test_the_program_of_a_run_takes_its_batches():
    """Runs that differ in their objective alone share a program, but for those with prefixes in their batches."""
    options = ["--config=gpt2:tiny", "--config.data.objective.kind=prefix"]
    for overrides, extra in (([], set()), (options[1:], {"prefix"})):
        config = without_hyper(parse([options[0], *overrides]))
        assert batch_shapes(config).keys() == BATCH.keys() | extra
    pairs = parse(["--config=tasks/sort:tiny", options[1], "--config.data.corpus=python_stdlib"])
    assert "prefix" not in batch_shapes(without_hyper(pairs))
