"""Shallow patterns of the triggers of a memory (Geva et al. 2021, section 3), found without a reader, beside their rates by
chance.

    shared        share of the triggers whose last token at least 2 other triggers of the key have too
    shared_2      the same for the last two tokens
    shared_word   the same for the last word: the letters and digits that end in or before the last token
    agreement     share of keys whose value's most likely token is the token after the key's first trigger

By chance: for triggers drawn at random from the same rows, and for the values in a random order.
"""

import re

import numpy as np

from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.token_text import plain

REPEATED = 3  # triggers of a key make a pattern, as in the paper
WORDS = 500  # keys whose words are compared: words need the tokenizer
REACH = 12  # tokens in which the last word is looked for
ORDERS = 20


def patterns(lm, rows: Sequences, at_KT, value_token_K, seed: int = 0) -> dict[str, float]:
    """The shares above, and {name_random: by chance}; NaN if there are no triggers. at_KT: numbers of tokens that the model
    reads, row * L + position; -1 for none. value_token_K: None for values that predict no token, which have no agreement."""
    tokens_NL, real_T = np.asarray(rows.inputs.tokens_NL), np.flatnonzero(rows.inputs.real_NL)
    rng = np.random.default_rng(seed)
    real_KT = at_KT >= 0
    random_KT = np.where(real_KT, real_T[rng.integers(len(real_T), size=at_KT.shape)], -1)
    some_K = np.sort(rng.permutation(np.flatnonzero(real_KT.any(1)))[:WORDS])
    figures = {}
    for name, chosen_KT in (("", at_KT), ("_random", random_KT)):
        last_KT, two_KT = ends(tokens_NL, chosen_KT)
        figures[f"shared{name}"] = _shared(last_KT, real_KT)
        figures[f"shared_2{name}"] = _shared(two_KT, real_KT)
        if lm.tokenizer:
            figures[f"shared_word{name}"] = _shared(words(lm, tokens_NL, chosen_KT[some_K]), real_KT[some_K])
    return figures if value_token_K is None else figures | agreement(rows, at_KT[:, 0], value_token_K, rng)


def ends(tokens_NL, at_KT) -> tuple[np.ndarray, np.ndarray]:
    """[K, T]: the last token of each trigger, and a number for its last two tokens."""
    flat = tokens_NL.reshape(-1).astype(np.int64)
    last_KT = flat[at_KT]
    before_KT = np.where(at_KT % tokens_NL.shape[1] > 0, flat[at_KT - 1], -1)
    return last_KT, last_KT * (flat.max() + 2) + before_KT


def words(lm, tokens_NL, at_KT) -> np.ndarray:
    """[K, T]: a number for the last word of each trigger; different negative ones for triggers without a word."""
    numbers: dict[str, int] = {}
    word_KT = -1 - np.arange(at_KT.size).reshape(at_KT.shape)
    for place, at in np.ndenumerate(at_KT):
        row, position = divmod(int(at), tokens_NL.shape[1])
        text = plain(lm.tokenizer, tokens_NL[row, max(position - REACH, 0) : position + 1])
        if word := re.findall(r"\w+", text.casefold())[-1:]:
            word_KT[place] = numbers.setdefault(word[0], len(numbers))
    return word_KT


def _shared(x_KT, real_KT) -> float:
    """The share of real triggers whose number at least REPEATED real triggers of their key have; NaN if there are none."""
    if not real_KT.any():
        return np.nan
    x_KT = np.where(real_KT, x_KT, np.iinfo(np.int64).min)
    return float((occurrences(x_KT) >= REPEATED)[real_KT].mean())


def occurrences(x_KT) -> np.ndarray:
    """[K, T]: how often each number occurs in its row."""
    return np.stack([(x_T[:, None] == x_T).sum(1) for x_T in x_KT])


def agreement(rows: Sequences, first_K, value_token_K, rng) -> dict[str, float]:
    """The share of keys whose value's most likely token follows their first trigger; {} if no trigger has a next token."""
    has_next_K = (first_K >= 0) & np.asarray(rows.has_next_NL).reshape(-1)[first_K]
    if not has_next_K.any():
        return {}
    own, next_token = value_token_K[has_next_K], np.asarray(rows.next_NL).reshape(-1)[first_K[has_next_K]]
    by_chance = np.mean([(rng.permutation(own) == next_token).mean() for _ in range(ORDERS)])
    return {"agreement": float((own == next_token).mean()), "agreement_random": float(by_chance)}
