"""Span corruption: the lengths of T5, a plain reference of its mask, and that a text comes back from source and target."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from xfresearch.data.objectives import generators
from xfresearch.data.objectives.span_corruption import SpanCorruption, _segments, raw_length
from xfresearch.data.pipeline import Batches, prepare
from xfresearch.data.tokenizers import ByteTokenizer, vocab_size
from xfresearch.options.objectives import SpanCorruption as Options
from xfresearch.runtime.errors import UserError

END = 256
FIRST = 257 + 100 - 1  # the first sentinel is the last id


def corruption(source_length=128, length=64, **options) -> SpanCorruption:
    return SpanCorruption.of(Options(**options), ByteTokenizer(), source_length, length)


@pytest.mark.parametrize(("source_length", "raw", "target"), [(256, 284, 58), (512, 568, 114), (1024, 1137, 229)])
def test_lengths_are_those_of_t5(source_length, raw, target):
    made = corruption(source_length, target)
    pair = made.pair(np.arange(raw) % 256, np.random.default_rng(0))
    assert (made.raw_length, len(pair.source), len(pair.target)) == (raw, source_length, target)
    with pytest.raises(UserError, match=f"sequence_length={target - 1} is not allowed: it must be at least {target}"):
        corruption(source_length, target - 1)


def test_a_long_source_needs_more_sentinels_than_t5_has():
    assert raw_length(2048, 0.15, 3.0) == 2274
    with pytest.raises(UserError, match="objective.sentinels=100 is not allowed: it must be at least 114, the spans of"):
        corruption(2048, 456)
    pair = corruption(2048, 456, sentinels=114).pair(np.zeros(2274, int), np.random.default_rng(0))
    assert (len(pair.source), len(pair.target)) == (2048, 456)


def reference_mask(length: int, density: float, mean_span: float, rng) -> np.ndarray:
    """random_spans_noise_mask of t5/data/preprocessors.py, line by line, without TensorFlow."""
    noise = min(max(int(np.round(length * density)), 1), length - 1)
    spans = max(int(np.round(noise / mean_span)), 1)

    def random_segmentation(items: int, parts: int) -> np.ndarray:
        first_in_segment = np.pad(rng.permutation(np.arange(items - 1) < parts - 1), (1, 0))
        return np.bincount(np.cumsum(first_in_segment))

    kept = random_segmentation(length - noise, spans)
    interleaved = np.stack([kept, random_segmentation(noise, spans)], 1).reshape(-1)
    starts = np.zeros(length, int)
    np.add.at(starts, np.cumsum(interleaved)[:-1], 1)
    return np.cumsum(starts) % 2 == 1


@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 3.0), (0.15, 1.0), (0.3, 8.0)])
@pytest.mark.parametrize("length", [2, 3, 10, 57, 300])
def test_the_mask_is_that_of_a_plain_reference(length, density, mean_span):
    made = corruption(512, 512, noise_density=density, mean_span=mean_span, sentinels=200)
    for seed in range(5):
        mask = made.mask(length, np.random.default_rng(seed))
        np.testing.assert_array_equal(mask, reference_mask(length, density, mean_span, np.random.default_rng(seed)))
        assert mask[-1] and not mask[0] and mask.sum() == min(max(round(length * density), 1), length - 1)


def test_every_way_to_cut_a_row_is_equally_likely():
    """Of 6 items in 3 parts there are 10 ways."""
    rng = np.random.default_rng(0)
    ways = Counter(tuple(_segments(6, 3, rng).tolist()) for _ in range(5000))
    assert len(ways) == 10 and all(abs(count - 500) < 5 * np.sqrt(450) for count in ways.values())


def restored(source: list[int], target: list[int]) -> list[int]:
    """The text: each sentinel of the source, by what follows it in the target."""
    assert source[-1] == target[-1] == END
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token > END:
            span = spans[token] = []
        else:
            span.append(token)
    assert list(spans) == [token for token in source if token > END] == list(range(FIRST, FIRST - len(spans), -1))
    return [token for each in source[:-1] for token in spans.get(each, [each])]


@pytest.mark.parametrize("options", [{}, {"noise_density": 0.5}, {"mean_span": 1.0}])
def test_a_text_comes_back_from_source_and_target(options):
    made = corruption(128, 160, **options)
    for seed, length in enumerate((made.raw_length, 50, 3, 2)):
        text = np.random.default_rng(seed).integers(256, size=length)
        pair = made.pair(text, np.random.default_rng(seed))
        assert restored(pair.source.tolist(), pair.target.tolist()) == text.tolist()
    pair = corruption(128, 160, noise_density=0.5, mean_span=1.0).pair(np.arange(3), np.random.default_rng(0))
    assert (len(pair.source), len(pair.target)) == (3, 4)  # one span of two tokens: there is one token for a span to follow
    rows = {"tokens": np.zeros((2, 9), int), "segments": np.array([[0] * 9, [1] + [0] * 8])}
    empty = made(rows, generators(0, range(2)))
    assert not empty["weights"].any() and not empty["source_segments"].any()


def test_batches_hold_the_text_once_and_draw_anew_every_epoch(make_config, text_dir):
    text = "".join(f"{i:04d}," for i in range(60))
    config = make_config(sequence_length=14, corpus=text_dir({"a.txt": text}), objective=Options(), batch_size=1)
    config = replace(config, source_length=40)
    split = prepare(config, "train")
    count, batches = len(split), Batches(config)
    seen = [batches.batch(step) for step in range(2 * count)]
    pairs = [(b["source"][b["source_segments"] > 0].tolist(), b["targets"][b["segments"] > 0].tolist()) for b in seen]
    texts = [bytes(restored(*pair)) for pair in pairs]
    assert sorted(texts[:count]) == sorted(texts[count:]) and len(set(texts)) == count
    assert sum(map(len, texts[:count])) > 0.8 * len(text)
    assert len({tuple(source) for source, _ in pairs}) == 2 * count
    batch = seen[0]
    assert batch["source"].shape == (1, 40) and batch["tokens"].shape == (1, 14) and batch["tokens"][0, 0] == END
    again = [split.read([0])["source"].tolist() for _ in range(2)]
    assert again[0] == again[1] and vocab_size(config.data) == FIRST + 1


def test_what_does_not_fit_is_refused():
    for options, message in (
        ({"noise_density": 0.9, "mean_span": 1.0}, "data.objective.noise_density=0.9 is not allowed: it must be smaller"),
        ({"source_length": 2}, "source_length=2 is not allowed: it must be at least 3"),
    ):
        with pytest.raises(UserError, match=message):
            corruption(**{"length": 512, "sentinels": 512} | options)
