"""Batches of a labelled data set (labels.py)."""

import hashlib
from typing import Any

import numpy as np

from xfresearch.data.labels import open_data_set
from xfresearch.data.order import OnePart
from xfresearch.data.packing import positions
from xfresearch.data.tasks.task import ENDLESS, NO_LABEL, Examples
from xfresearch.runtime.errors import UserError, nearest

PROBED = 64  # sequences whose content is in the digest: another version of Python or NumPy may draw others


class LabelledSplit(OnePart):
    """A split of a labelled data set, read by index. It has the interface of packed.PackedSplit, and the answers."""

    def __init__(self, corpus: str, split: str, length: int):
        self.data_set = open_data_set(corpus, length)
        if split not in self.data_set.splits:
            known = ", ".join(self.data_set.splits)
            raise UserError(
                f"corpus {corpus!r} has no split {split!r}; it has: {known}{nearest(split, self.data_set.splits)}"
            )
        self.split, self.length = split, length
        size = self.data_set.size(split, length)
        counts = {"n_sequences": size, "n_tokens": size * length, "n_bytes": 0}
        self.meta: dict[str, Any] = counts | {"vocab_size": self.data_set.vocab_size}
        self.endless = size == ENDLESS
        content = repr((self.data_set, split, length, size)).encode()
        for values_BL in self.examples(range(min(PROBED, size))):
            content += values_BL.astype(np.int64).tobytes()
        self.digest = hashlib.sha256(content).hexdigest()

    def __len__(self) -> int:
        return self.meta["n_sequences"]

    def examples(self, indices) -> Examples:
        """The sequences with these numbers, and their answers."""
        return self.data_set.read(self.split, indices, self.length)

    def read(self, indices) -> dict[str, np.ndarray]:
        """tokens, targets, segments, positions int32[n, L] and weights float32[n, L], 0 for a token without a label."""
        return _batch(self.examples(indices))

    def graded(self, indices) -> dict[str, np.ndarray]:
        """The same, and `answers` and `difficulty`, int32[n, L], for evaluation."""
        examples = self.examples(indices)
        return _batch(examples) | {name: getattr(examples, name).astype(np.int32) for name in ("answers", "difficulty")}


def _batch(examples: Examples) -> dict[str, np.ndarray]:
    return {
        "tokens": examples.tokens.astype(np.int32),
        "targets": np.maximum(examples.targets, 0).astype(np.int32),  # NO_LABEL is not a valid index
        "weights": (examples.targets != NO_LABEL).astype(np.float32),
        "segments": examples.segments.astype(np.int32),
        "positions": positions(examples.segments),
    }
