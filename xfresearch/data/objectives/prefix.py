"""Prefixes (Raffel et al. 2020, T5, sec. 3.2.1), as prefix_lm of t5/data/preprocessors.py.

Of a text of T tokens, the prefix has the first 1 to T - 1, each number equally likely. With an encoder it is the source, and
the target is the rest; both end with end_of_text. With fixed lengths, each fills its places. In a single stack the tokens of
the prefix see each other, as in the paper's figure 3, and the loss is that of the rest (RowPrefix).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xfresearch.data.pairs import pair_packing
from xfresearch.data.pairs.pair_packing import Pair
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.options import objectives as options
from xfresearch.options.run_options import RunConfig
from xfresearch.runtime.errors import require


class Prefix(NamedTuple):
    source_length: int
    length: int
    start: int  # what the decoder reads first
    end: int
    fixed: int  # tokens of every prefix; 0 for any number

    @classmethod
    def of(cls, chosen: options.Prefix, tokenizer: Tokenizer, source_length: int, length: int) -> "Prefix":
        """Raises UserError if the decoder has no place for the longest target, which has all tokens but one, and its end."""
        require(source_length > 2, "source_length", source_length, "at least 3 with data.objective.kind='prefix'")
        fixed = chosen.lengths == "fixed"
        allowed = f"at least {source_length - 1}, the longest target with source_length={source_length}"
        require(fixed or length >= source_length - 1, "sequence_length", length, allowed)
        return cls(source_length, length, tokenizer.decoder_start, tokenizer.end_of_text, fixed * (source_length - 1))

    def __call__(self, rows: dict[str, np.ndarray], rngs: Sequence[np.random.Generator]) -> dict[str, np.ndarray]:
        """The batch of an encoder and a decoder (pairs/pair_packing.py) from rows [B, T] of a stream."""
        texts = [tokens_T[segments_T > 0] for tokens_T, segments_T in zip(rows["tokens"], rows["segments"], strict=True)]
        pairs = [[self.pair(text, rng)] if len(text) > 1 else [] for text, rng in zip(texts, rngs, strict=True)]
        return pair_packing.batch(pairs, self.source_length, self.length, self.start)

    def pair(self, tokens_T: np.ndarray, rng: np.random.Generator) -> Pair:
        """The two parts of a text of at least two tokens."""
        first = min(self.fixed, len(tokens_T) - 1) or rng.integers(1, len(tokens_T))
        parts = np.split(tokens_T, [first])
        return Pair(*(np.append(part, self.end).astype(np.int32) for part in parts))


class RowPrefix:
    """Prefixes for a single stack: one in each document of a row, which segment ids separate, or in each row of a stream."""

    def __call__(self, rows: dict[str, np.ndarray], rngs: Sequence[np.random.Generator]) -> dict[str, np.ndarray]:
        """The batch with `prefix`, 1 for the tokens of prefixes, and weights 1 for the targets after them. A document of one
        token has no prefix."""
        prefix_BL, weights_BL = np.zeros_like(rows["segments"]), rows["weights"].copy()
        for prefix_L, weights_L, segments_L, rng in zip(prefix_BL, weights_BL, rows["segments"], rngs, strict=True):
            for number in range(1, segments_L.max(initial=0) + 1):
                places = np.flatnonzero(segments_L == number)
                length = rng.integers(1, len(places)) if len(places) > 1 else 0
                prefix_L[places[:length]] = 1
                weights_L[places[: max(length - 1, 0)]] = 0  # the last token of the prefix predicts the first one after it
        return {**rows, "weights": weights_BL, "prefix": prefix_BL}


def objective_of(run: RunConfig, tokenizer: Tokenizer) -> Prefix | RowPrefix:
    """Raises UserError if an option is set that a single stack does not have."""
    chosen = run.data.objective
    if run.source_length:
        return Prefix.of(chosen, tokenizer, run.source_length, run.sequence_length)
    require(chosen.lengths == "random", "data.objective.lengths", chosen.lengths, "'random' without an encoder")
    return RowPrefix()


def row_length(run: RunConfig) -> int:
    """T, the tokens of a text whose parts an encoder and a decoder read; a single stack reads them in one row."""
    if not run.source_length:
        return run.sequence_length
    return run.source_length - 1 + (run.sequence_length - 1 if run.data.objective.lengths == "fixed" else 0)
