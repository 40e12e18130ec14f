"""Span corruption (Raffel et al. 2020, T5, sec. 3.1.4), as t5/data/preprocessors.py computes it (span_corruption,
random_spans_helper, random_spans_noise_mask, noise_span_to_unique_sentinel, nonnoise_span_to_unique_sentinel).

Of T tokens, n = round(noise_density T) are noise, in s = round(n / mean_span) spans, which begin after the first token and
of which the last one ends the text. The source has the other tokens with a sentinel for each span, the target each sentinel
and then its span; both end with end_of_text.

    text      the old dogs did not follow a small boat
    source    the old <0> not follow a <1>
    target    <0> dogs did <1> small boat
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xfresearch.data.pairs import pair_packing
from xfresearch.data.pairs.pair_packing import Pair
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.data.tokenizers.added_ids import sentinels
from xfresearch.options import objectives as options
from xfresearch.options.run_options import RunConfig
from xfresearch.runtime.errors import require

KEY = "data.objective"


class Noise(NamedTuple):
    """The sizes of a text of T tokens."""

    tokens: int  # n of them are noise
    spans: int

    @classmethod
    def of(cls, length: int, density: float, mean_span: float) -> "Noise":
        """Halves are rounded to the even number, as in T5's code. There is at least one span, and a token before each."""
        noise = min(max(round(length * density), 1), length - 1)
        return cls(noise, min(max(round(noise / mean_span), 1), length - noise))


def raw_length(source_length: int, density: float, mean_span: float) -> int:
    """The largest number of tokens T whose source, with its end, has at most `source_length` tokens. With a density of 0.5
    it is one fewer if the target is longer than the source, as in T5's code."""
    length = source_length - 1
    while _lengths(length + 1, density, mean_span)[0] <= source_length:
        length += 1
    source, target = _lengths(length, density, mean_span)
    return length - int(density == 0.5 and target > source)


def _lengths(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Tokens of the source and of the target of a text, with their ends."""
    noise = round(length * density)
    spans = round(noise / mean_span)
    return length - noise + spans + 1, noise + spans + 1


@dataclass(frozen=True)
class SpanCorruption:
    density: float
    mean_span: float
    raw_length: int  # T of the rows that it reads
    source_length: int
    length: int
    start: int  # what the decoder reads first
    end: int
    sentinels: np.ndarray  # ids of the first sentinel, of the second, ...

    @classmethod
    def of(
        cls, chosen: options.SpanCorruption, tokenizer: Tokenizer, source_length: int, length: int
    ) -> "SpanCorruption":
        """Raises UserError if a row needs more sentinels or more places in the decoder than there are."""
        density, mean_span = chosen.noise_density, chosen.mean_span
        require(source_length > 2, "source_length", source_length, f"at least 3 with {KEY}.kind='span_corruption'")
        raw = raw_length(source_length, density, mean_span)
        noise, ids = Noise.of(raw, density, mean_span), sentinels(chosen, tokenizer)
        rows = f"rows of {raw} tokens, which source_length={source_length} has place for"
        allowed = f"smaller with {KEY}.mean_span={mean_span}: a token must be before each span"
        require(round(noise.tokens / mean_span) <= raw - noise.tokens, f"{KEY}.noise_density", density, allowed)
        allowed = f"at least {noise.spans}, the spans of {rows}"
        require(noise.spans <= len(ids), f"{KEY}.sentinels", len(ids), allowed)
        needed = noise.tokens + noise.spans + 1
        require(length >= needed, "sequence_length", length, f"at least {needed}, the targets of {rows}")
        return cls(density, mean_span, raw, source_length, length, tokenizer.decoder_start, tokenizer.end_of_text, ids)

    def __call__(self, rows: dict[str, np.ndarray], rngs: Sequence[np.random.Generator]) -> dict[str, np.ndarray]:
        """The batch of an encoder and a decoder (pairs/pair_packing.py) from rows [B, T] of a stream."""
        texts = [tokens_T[segments_T > 0] for tokens_T, segments_T in zip(rows["tokens"], rows["segments"], strict=True)]
        pairs = [[self.pair(text, rng)] if len(text) > 1 else [] for text, rng in zip(texts, rngs, strict=True)]
        return pair_packing.batch(pairs, self.source_length, self.length, self.start)

    def pair(self, tokens_T: np.ndarray, rng: np.random.Generator) -> Pair:
        """The source and the target of a text of at least two tokens."""
        noise_T = self.mask(len(tokens_T), rng)
        return Pair(self._marked(tokens_T, noise_T), self._marked(tokens_T, ~noise_T))

    def mask(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Which of `length` tokens are noise: bool [T]."""
        noise = Noise.of(length, self.density, self.mean_span)
        kept = _segments(length - noise.tokens, noise.spans, rng)
        noised = _segments(noise.tokens, noise.spans, rng)
        return np.repeat(np.tile([False, True], noise.spans), np.stack([kept, noised], 1).ravel())

    def _marked(self, tokens_T: np.ndarray, hidden_T: np.ndarray) -> np.ndarray:
        """The tokens, with one sentinel in the place of each hidden span, and the end."""
        begins_T = hidden_T & ~np.concatenate([[False], hidden_T[:-1]])
        marked_T = np.where(begins_T, self.sentinels[np.maximum(np.cumsum(begins_T) - 1, 0)], tokens_T)
        return np.append(marked_T[begins_T | ~hidden_T], self.end).astype(np.int32)


def _segments(items: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """The sizes of `items` in a row, cut into so many parts that are not empty, each way equally likely."""
    starts = rng.permutation(np.arange(items - 1) < parts - 1)
    return np.diff(np.flatnonzero(np.concatenate([[True], starts, [True]])))


def objective_of(run: RunConfig, tokenizer: Tokenizer) -> SpanCorruption:
    return SpanCorruption.of(run.data.objective, tokenizer, run.source_length, run.sequence_length)


def row_length(run: RunConfig) -> int:
    return raw_length(run.source_length, run.data.objective.noise_density, run.data.objective.mean_span)
