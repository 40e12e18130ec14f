"""Ids that objectives need beside those of text: the mask token, sentinels, and the start of a decoder's input.

A tokenizer's file may have them as special tokens. Otherwise they are added at the end of its vocabulary.
"""

from typing import Any

import numpy as np

from xfresearch.data.tokenizers.base import Tokenizer

SENTINEL = "<extra_id_{}>"  # T5's; the first one has the last id
MASKS = ("[MASK]", "<mask>")  # BERT's, and those of RoBERTa and BART


def added_ids(objective: Any, special_tokens: dict[str, int]) -> int:
    """The number of ids that an objective (options/objectives.py) adds to a tokenizer with these special tokens."""
    if objective.kind == "masked":
        return int(not any(name in special_tokens for name in MASKS))
    if objective.kind == "span_corruption":
        return 0 if SENTINEL.format(0) in special_tokens else objective.sentinels
    return 0


def mask_id(tokenizer: Tokenizer) -> int:
    """The id of the mask token: the tokenizer's own, or the one after its last id."""
    return next((tokenizer.special_tokens[name] for name in MASKS if name in tokenizer.special_tokens), tokenizer.vocab_size)


def sentinels(objective: Any, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of the sentinels: the tokenizer's own <extra_id_0>, <extra_id_1>, ..., or new ids after its last one, the
    highest for the first sentinel, as in T5."""
    own: list[int] = []
    while (name := SENTINEL.format(len(own))) in tokenizer.special_tokens:
        own.append(tokenizer.special_tokens[name])
    return np.array(own) if own else tokenizer.vocab_size + np.arange(objective.sentinels)[::-1]


def special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of a tokenizer that stand for no text."""
    begins = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
    return tuple(sorted({tokenizer.end_of_text, *begins, *tokenizer.special_tokens.values()}))
