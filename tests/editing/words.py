"""A tokenizer of whole words, and a network that knows facts: one unit of its feed-forward layer for each subject."""

import re

import numpy as np

from tests.analysis.test_planted import finished, network
from xfresearch.data.tokenizers.base import Tokenizer

SUBJECTS = ("Ada", "Bea", "Cid", "Dov")
OBJECTS = (" red", " blue", " green")
WORDS = (*SUBJECTS, *OBJECTS, " is", " a", ".", " Ada", " Bea", " Cid", " Dov", "\n")
OBJECT_OF = (0, 1, 1, 0)  # of each subject


class WordTokenizer(Tokenizer):
    def __init__(self):
        super().__init__([word.encode() for word in WORDS], {"words": " ".join(WORDS).encode()})

    def _encode(self, text: bytes):
        found = re.findall(r" ?\w+|\n|.", text.decode())
        return [WORDS.index(word) if word in WORDS else len(WORDS) - 1 for word in found]


def knowing(strength: float = 12.0, **run):
    """A network in which each subject is followed by its object, with or without a space in front of the subject. Unit s
    reads subject s and writes its object; the stream of a token is its own dimension."""
    V, F = len(WORDS) + 1, len(SUBJECTS)
    config, params = network({"width": V, "vocab_size": V}, {"feed_forward.kind": "relu", "feed_forward.hidden": F})
    params["embed"]["table"][:] = np.eye(V)
    feed_forward = params["blocks"]["main"]["feed_forward"]
    for unit, subject in enumerate(SUBJECTS):
        feed_forward["up"]["kernel"][0, [WORDS.index(subject), WORDS.index(" " + subject)], unit] = 1.0
        feed_forward["down"]["kernel"][0, unit, WORDS.index(OBJECTS[OBJECT_OF[unit]])] = strength
    lm = finished(config, params)
    lm.tokenizer = WordTokenizer()
    return lm
