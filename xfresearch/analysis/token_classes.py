"""Classes of tokens, and the weight that attention puts on each.

    word          letters after a space, or at the start of a text     space    spaces, tabs and line ends only
    letters       letters that continue a word                         special  tokens that are no text
    digits        digits, perhaps after a space                        other    the rest: parts of characters, mixtures
    punctuation   no letters or digits, perhaps after a space
"""

import unicodedata

import numpy as np

from xfresearch.analysis.token_text import plain

CLASSES = ("word", "letters", "digits", "punctuation", "space", "special", "other")


def classes(tokenizer, vocab_size: int) -> np.ndarray:
    """[V]: the number of each token's class in CLASSES."""
    return np.array([CLASSES.index(class_of(plain(tokenizer, [token]))) for token in range(vocab_size)])


def class_of(text: str) -> str:
    """The class of a token with this text."""
    if not text:
        return "special"
    bare = text.strip()
    if not bare:
        return "space"
    if "\ufffd" in bare:
        return "other"
    if bare.isdigit():
        return "digits"
    if all(unicodedata.category(letter)[0] in "LM" for letter in bare):
        return "word" if text[0].isspace() else "letters"
    return "other" if any(letter.isalnum() for letter in bare) else "punctuation"


def by_class(received_BHS, tokens_BL, class_V) -> np.ndarray:
    """[H, C]: the mean weight of a query on the tokens of each class, from `received_BHS`, that on each token."""
    class_BSC = class_V[tokens_BL][..., None] == np.arange(len(CLASSES))
    return np.einsum("bhs,bsc->hc", received_BHS.astype(np.float64), class_BSC) / len(tokens_BL)


def even(tokens_BL, class_V, causal: bool) -> np.ndarray:
    """[C]: the same for equal weights on the token and all before it (without `causal` on all tokens), averaged over the
    queries except the first one. Windows and other masks of layers are not part of it."""
    length = tokens_BL.shape[1]
    seen_LS = np.tri(length) if causal else np.ones((length, length))
    received_S = (seen_LS / seen_LS.sum(1, keepdims=True))[1:].mean(0)
    return by_class(np.broadcast_to(received_S, (len(tokens_BL), 1, length)), tokens_BL, class_V)[0]
