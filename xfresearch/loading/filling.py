"""The likeliest tokens in the place of each mask of a text, by a model that is not causal."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xfresearch.data.tokenizers import Tokenizer
from xfresearch.data.tokenizers.added_ids import MASKS, mask_id
from xfresearch.models.decoding import padded_length
from xfresearch.models.inputs import encode
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime.errors import UserError, require

Guesses = list[list[tuple[str, float]]]  # of each mask: texts of tokens with their probabilities, the likeliest first


def masked_ids(model: ModelConfig, tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a text in which [MASK] or <mask> is the mask token. Raises UserError if it has none."""
    require(not model.causal, "model.causal", True, "False to fill masks: from left to right, generate continues a text")
    mask = mask_id(tokenizer)
    if mask < tokenizer.vocab_size:
        ids = encode(model, tokenizer, text, "text", special_tokens=True)
    else:  # a token that the objective has added, which has no text of its own
        begin, *parts = re.split("|".join(map(re.escape, MASKS)), text)
        of_parts = [[mask, *tokenizer.encode(part.encode()).tolist()] for part in parts]
        ids = [*encode(model, tokenizer, begin, "text"), *(number for part in of_parts for number in part)]
    if mask not in ids:
        own = next((name for name in MASKS if tokenizer.special_tokens.get(name) == mask), MASKS[0])
        raise UserError(f"text={text!r} is not allowed: it must have {own} in the places to fill")
    return ids


def padded(rows: Sequence[Sequence[int]], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments [B, L], padded on the right. L is the `padded_length` of the rows, or `longest`."""
    most = max(map(len, rows))
    length = padded_length(most)
    length = max(most, min(length, longest)) if longest else length
    tokens_BL, segments_BL = np.zeros((2, len(rows), length), np.int32)
    for row, ids in enumerate(rows):
        tokens_BL[row, : len(ids)], segments_BL[row, : len(ids)] = ids, 1
    return tokens_BL, segments_BL


def guesses(tokenizer: Tokenizer, tokens_BL: np.ndarray, logits_BLV: Any, top_k: int) -> list[Guesses]:
    """The `top_k` likeliest tokens of each mask of each row."""
    mask = mask_id(tokenizer)
    names = {mask: MASKS[0]} | {number: name for name, number in tokenizer.special_tokens.items()}
    filled: list[Guesses] = [[] for _ in tokens_BL]
    for row, place in zip(*np.nonzero(tokens_BL == mask), strict=True):
        p_V = np.asarray(jax.nn.softmax(logits_BLV[row, place]))
        best = np.argsort(-p_V, kind="stable")[:top_k]
        filled[row].append([(_text(tokenizer, names, int(number)), float(p_V[number])) for number in best])
    return filled


def _text(tokenizer: Tokenizer, names: dict[int, str], number: int) -> str:
    """The text of a token (Tokenizer.piece); for a special token its name in `names`; <300> for an id that has neither."""
    unnamed = number >= tokenizer.vocab_size or not tokenizer.byte_lengths[number]
    return names.get(number, f"<{number}>") if number in names or unnamed else tokenizer.piece(number)
