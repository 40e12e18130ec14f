"""Masked tokens (Devlin et al. 2019, BERT, sec. 3.1 and their create_pretraining_data.py).

Of the n tokens of a row that are neither padding nor special, max(1, round(rate n)) are predicted. Each of them is seen as
the mask token with probability mask_share, as a token drawn from the whole vocabulary with random_share, otherwise as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xfresearch.data.tokenizers import Tokenizer
from xfresearch.data.tokenizers.added_ids import mask_id, special_ids
from xfresearch.options import objectives as options
from xfresearch.options.run_options import RunConfig


@dataclass(frozen=True)
class Masked:
    rate: float
    mask_share: float
    random_share: float
    mask: int  # id of the mask token
    vocab_size: int  # of the tokens that are drawn
    special: tuple[int, ...]  # ids that are never predicted

    @classmethod
    def of(cls, chosen: options.Masked, tokenizer: Tokenizer) -> "Masked":
        shares = (chosen.rate, chosen.mask_share, chosen.random_share)
        return cls(*shares, mask_id(tokenizer), tokenizer.vocab_size, special_ids(tokenizer))

    def __call__(self, rows: dict[str, np.ndarray], rngs: Sequence[np.random.Generator]) -> dict[str, np.ndarray]:
        """The batch: tokens as the model sees them, targets as they are, weights 1 for those that are predicted."""
        targets_BL = rows["tokens"]
        tokens_BL, weights_BL = targets_BL.copy(), np.zeros_like(rows["weights"])
        for tokens_L, weights_L, allowed_L, rng in zip(tokens_BL, weights_BL, self.allowed(rows), rngs, strict=True):
            places = np.flatnonzero(allowed_L)
            if not len(places):
                continue
            chosen = rng.choice(places, max(1, round(self.rate * len(places))), replace=False)
            share, drawn = rng.random(len(chosen)), rng.integers(self.vocab_size, size=len(chosen))
            seen = np.where(share < self.mask_share + self.random_share, drawn, tokens_L[chosen])
            tokens_L[chosen] = np.where(share < self.mask_share, self.mask, seen)
            weights_L[chosen] = 1
        return {**rows, "tokens": tokens_BL, "targets": targets_BL, "weights": weights_BL}

    def allowed(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Which tokens may be predicted: bool [B, L], without padding and special tokens."""
        allowed_BL: np.ndarray = (rows["segments"] > 0) & ~np.isin(rows["tokens"], self.special)
        return allowed_BL


def objective_of(run: RunConfig, tokenizer: Tokenizer) -> Masked:
    return Masked.of(run.data.objective, tokenizer)


def row_length(run: RunConfig) -> int:
    return run.sequence_length
