"""Letters, and then the same letters in the order of the alphabet, by an encoder and a decoder.

sort         1.0 M parameters; some minutes on two cores
sort:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs.tasks.pairs import pairs


def get_config(size: str = "full"):
    return pairs(size, "sort")
