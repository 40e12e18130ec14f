"""Letters, and then the same letters from the last to the first, by an encoder and a decoder.

reverse         1.0 M parameters; some minutes on two cores
reverse:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs.tasks.pairs import pairs


def get_config(size: str = "full"):
    return pairs(size, "reverse")
