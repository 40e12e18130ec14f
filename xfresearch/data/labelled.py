"""Batches of a labelled data set (labels.py)."""

import hashlib

import numpy as np

from xfresearch.data.labels import open_data_set
from xfresearch.runtime.errors import UserError, nearest


class LabelledSplit:
    """A split of a labelled data set, read by index. It has the interface of packed.PackedSplit."""

    def __init__(self, corpus: str, split: str, length: int):
        data_set = open_data_set(corpus, length)
        if split not in data_set.splits:
            known = ", ".join(data_set.splits)
            raise UserError(
                f"corpus {corpus!r} has no split {split!r}; it has: {known}{nearest(split, data_set.splits)}"
            )
        self.tokens_NL, self.targets_NL = data_set.examples(split, length)
        size = self.tokens_NL.size
        content = self.tokens_NL.astype(np.int64).tobytes() + self.targets_NL.astype(np.int64).tobytes()
        self.digest = hashlib.sha256(content).hexdigest()
        self.meta = {"n_sequences": len(self), "n_tokens": size, "n_bytes": 0, "vocab_size": data_set.vocab_size}

    def __len__(self) -> int:
        return len(self.tokens_NL)

    def read(self, indices) -> dict[str, np.ndarray]:
        """tokens, targets, segments, positions int32[n, L] and weights float32[n, L], 0 for a token without a label."""
        indices = np.asarray(indices, int)
        tokens_BL = self.tokens_NL[indices]
        targets_BL = self.targets_NL[indices]
        return {
            "tokens": tokens_BL.astype(np.int32),
            "targets": np.maximum(targets_BL, 0).astype(np.int32),  # -1, no label, is not a valid index
            "weights": (targets_BL >= 0).astype(np.float32),
            "segments": np.ones(tokens_BL.shape, np.int32),
            "positions": np.broadcast_to(np.arange(tokens_BL.shape[1], dtype=np.int32), tokens_BL.shape),
        }
