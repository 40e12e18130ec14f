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


def even(tokens_BS, class_V, seen_BLS) -> np.ndarray:
    """[C]: the same for equal weights of each query on the tokens that it sees, of queries that see any. Windows and other
    masks of layers are not part of it."""
    counts_BL = seen_BLS.sum(-1)
    weights_BLS = seen_BLS / np.maximum(counts_BL, 1)[..., None]
    received_BS = weights_BLS.sum(1) / np.maximum((counts_BL > 0).sum(1), 1)[:, None]
    return by_class(received_BS[:, None], tokens_BS, class_V)[0]


def seen(rows, causal: bool) -> np.ndarray:
    """[B, L, S]: which tokens a query sees in its own sequence; the first query, and padding, count as seeing none."""
    real_BL = np.array(rows.real_NL)
    seen_BLS = real_BL[:, :, None] & real_BL[:, None, :]
    seen_BLS &= np.tri(real_BL.shape[1], dtype=bool) if causal else True
    seen_BLS[:, 0] = False
    return seen_BLS
