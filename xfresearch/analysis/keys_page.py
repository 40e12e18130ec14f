"""A page of the keys of a memory, or of the features of a dictionary: each with its triggers and the tokens that it writes.

The page has the KEYS keys with the largest coefficients, without those that have no trigger; a browser's search finds
their text.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xfresearch.analysis.token_text import shown
from xfresearch.pages.html import page

KEYS = 2000
TRIGGERS = 10  # of a key
BEFORE, AFTER = 60, 20  # characters of a trigger


class Trigger(NamedTuple):
    before: str
    token: str
    after: str
    coefficient: float


class Key(NamedTuple):
    number: int
    triggers: list[Trigger]
    shared: str  # the token that ends the largest number of the triggers
    share: float
    words: list[str]  # the most likely tokens of the value


def keys_page(lm, title: str, about: str, tokens_NL, at_KT, coefficients_KT, words_KW, noun: str = "keys") -> bytes:
    """An HTML page, which loads nothing from the network.

    tokens_NL: the rows. at_KT: numbers of the triggers' tokens, row * L + position, the strongest first; -1 for none.
    words_KW: token ids, the most likely first. noun: what the keys are called."""
    order = np.argsort(-coefficients_KT[:, 0], kind="stable")
    order = order[at_KT[order, 0] >= 0][:KEYS]
    keys = [_key(lm, int(k), tokens_NL, at_KT[k], coefficients_KT[k], words_KW[k]) for k in order]
    return page(Path(__file__).parent / "keys.html.jinja", title=title, about=about, keys=keys, noun=noun, count=len(at_KT))


def _key(lm, number: int, tokens_NL, at_T, coefficients_T, words_W) -> Key:
    at_T = at_T[at_T >= 0]
    triggers = [trigger(lm, tokens_NL, int(at), float(m)) for at, m in zip(at_T[:TRIGGERS], coefficients_T, strict=False)]
    ends = Counter(tokens_NL.reshape(-1)[at_T].tolist()).most_common(1)
    shared, times = ends[0] if ends else (0, 0)
    return Key(number, triggers, text(lm, [shared]), times / max(len(at_T), 1), [text(lm, [word]) for word in words_W])


def trigger(lm, tokens_NL, at: int, coefficient: float) -> Trigger:
    """The token number `at` with the text around it."""
    row, position = divmod(at, tokens_NL.shape[1])
    tokens = tokens_NL[row]
    before = text(lm, tokens[max(position - BEFORE, 0) : position])[-BEFORE:]
    after = text(lm, tokens[position + 1 : position + 1 + AFTER])[:AFTER]
    return Trigger(before, text(lm, tokens[position : position + 1]), after, coefficient)


def text(lm, tokens) -> str:
    """The tokens as text, or as numbers without a tokenizer."""
    return shown(lm.tokenizer, tokens)
