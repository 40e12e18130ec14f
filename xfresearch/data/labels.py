"""Data sets with labels: sequences of tokens, and at every token a label, which is not the next token.

In data.corpus one is `NAME` or `NAME:OPTION=VALUE,...`, and stands alone. It has no text, hence no tokenizer and no bytes;
its sequences are full, of config.sequence_length tokens. A new data set is a file with a class and a line in DATA_SETS.
The class is a frozen dataclass, whose fields (config/fields.py) are its options, with what `Labelled` below names.
"""

import ast
from typing import Protocol

from xfresearch.config.reading import from_dict
from xfresearch.data.majority import Majority
from xfresearch.errors import require

DATA_SETS = {"majority": Majority}
# Fields of DataConfig that say how a text is read.
OF_TEXT = ("weights", "field", "tokenizer", "packing", "manual_dir", "workers")


class Labelled(Protocol):
    """A data set with its options. Tokens and labels are below `vocab_size`."""

    splits: tuple[str, ...]
    vocab_size: int

    def check(self, length: int) -> None:
        """UserError where the options do not fit each other, or sequences of `length` tokens."""

    def examples(self, split: str, length: int) -> tuple:
        """Arrays of integers, tokens [N, L] and targets [N, L]; a target below 0 is no label. They depend on the options,
        the split and the length alone: every process of a run calls this, and every one that goes on with it."""


def has_labels(corpus: str) -> bool:
    """Whether `corpus`, an entry of data.corpus, is a data set with labels."""
    return corpus.partition(":")[0] in DATA_SETS


def trains_on_labels(data) -> bool:
    """Whether a run on `data` (a DataConfig) predicts labels, and not next tokens."""
    return any(map(has_labels, data.corpus))


def open_data_set(corpus: str, length: int) -> Labelled:
    """The data set that `corpus` names, for sequences of `length` tokens; UserError where its options are wrong."""
    name, _, options = corpus.partition(":")
    pairs = [pair.partition("=") for pair in options.split(",") if options]
    form = f"{name}:OPTION=VALUE,OPTION=VALUE"
    require(all(equals for _, equals, _ in pairs), "data.corpus", corpus, f"of the form {form}")
    values = {option: _value(text) for option, _, text in pairs}
    data_set = from_dict(DATA_SETS[name], values, f"config.data.corpus: {name}")
    data_set.check(length)
    return data_set


def _value(text: str):
    """The number that `text` is, otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
