"""Prefixes: each text comes back, each length is equally likely, and a row fits."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from xfresearch.config.objectives import Prefix as Options
from xfresearch.data.objectives.prefix import Prefix
from xfresearch.data.pipeline import Batches
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.runtime.errors import UserError

END = 256


def test_every_length_of_a_prefix_is_equally_likely():
    made, rng = Prefix.of(ByteTokenizer(), 9, 8), np.random.default_rng(0)
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
        Prefix.of(ByteTokenizer(), 9, 7)
