"""A small translation with agreement and reordering, by an encoder and a decoder (data/pairs/translation.py).

translation         1.1 M parameters; some minutes on two cores
translation:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs.tasks.pairs import pairs


def get_config(size: str = "full"):
    config = pairs(size, "translation")
    config.data.tokenizer, config.data.bpe_vocab = "bpe", 1024  # each word of the two languages is a token
    return config
