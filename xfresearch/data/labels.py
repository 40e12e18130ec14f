"""Data sets with labels: sequences of tokens, and at every token a label, which is not the next token.

In data.corpus one is `NAME` or `NAME:OPTION=VALUE,...`, and stands alone. It has no text, hence no tokenizer and no bytes;
its sequences are full, of config.sequence_length tokens. A new data set is a file with a class and a line in DATA_SETS.
The class is a frozen dataclass, whose fields (config.option) are its options, with what `Labelled` below names.
"""

import ast
from typing import Protocol

import numpy as np

from xfresearch.config import DataConfig
from xfresearch.errors import UserError, nearest, require
from xfresearch.models.variants import load

DATA_SETS = {"majority": "xfresearch.data.majority:Majority"}
# Fields of DataConfig that say how a text is read.
OF_TEXT = ("weights", "field", "tokenizer", "packing", "manual_dir", "workers")


class Labelled(Protocol):
    """A data set with its options. Tokens and labels are below `vocab_size`."""

    splits: tuple[str, ...]
    vocab_size: int

    def check(self, length: int) -> None:
        """UserError where the options do not fit each other, or sequences of `length` tokens."""

    def examples(self, split: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens [N, L] and targets [N, L], integers; a target below 0 is no label. They depend on the options, the split
        and the length alone: every process of a run calls this, and every one that goes on with it."""


def has_labels(corpus: str) -> bool:
    """Whether `corpus`, an entry of data.corpus, is a data set with labels."""
    return corpus.partition(":")[0] in DATA_SETS


def trains_on_labels(data: DataConfig) -> bool:
    """Whether a run on `data` predicts labels, and not next tokens."""
    return any(map(has_labels, data.corpus))


def open_data_set(corpus: str, length: int) -> Labelled:
    """The data set that `corpus` names, for sequences of `length` tokens; UserError where its options are wrong."""
    from xfresearch.config_io import from_dict  # it imports resolving.py, which opens data sets

    name, _, options = corpus.partition(":")
    pairs = [pair.partition("=") for pair in options.split(",") if options]
    form = f"{name}:OPTION=VALUE,OPTION=VALUE"
    require(all(equals for _, equals, _ in pairs), "data.corpus", corpus, f"of the form {form}")
    values = {option: _value(text) for option, _, text in pairs}
    data_set = from_dict(load(DATA_SETS[name]), values, f"config.data.corpus: {name}")
    data_set.check(length)
    return data_set


def _value(text: str):
    """The number that `text` is, otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class LabelledSplit:
    """A split of a data set with labels, read by index as packed.PackedSplit is."""

    def __init__(self, corpus: str, split: str, length: int):
        data_set = open_data_set(corpus, length)
        if split not in data_set.splits:
            known = ", ".join(data_set.splits)
            raise UserError(
                f"corpus {corpus!r} has no split {split!r}; it has: {known}{nearest(split, data_set.splits)}"
            )
        self.tokens_NL, self.targets_NL = data_set.examples(split, length)
        size = self.tokens_NL.size
        self.meta = {"n_sequences": len(self), "n_tokens": size, "n_bytes": 0, "vocab_size": data_set.vocab_size}

    def __len__(self) -> int:
        return len(self.tokens_NL)

    def read(self, indices) -> dict[str, np.ndarray]:
        """tokens, targets, segments, positions int32[n, L] and weights float32[n, L], 0 where there is no label."""
        tokens_BL, targets_BL = (values[np.asarray(indices, int)] for values in (self.tokens_NL, self.targets_NL))
        return {
            "tokens": tokens_BL.astype(np.int32),
            "targets": np.maximum(targets_BL, 0).astype(np.int32),
            "weights": (targets_BL >= 0).astype(np.float32),
            "segments": np.ones(tokens_BL.shape, np.int32),
            "positions": np.broadcast_to(np.arange(tokens_BL.shape[1], dtype=np.int32), tokens_BL.shape),
        }
