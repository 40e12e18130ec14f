"""Compression baselines: unigram entropy, byte trigram, xz.

Each takes documents as bytes and returns bits per held-out byte. None depends on a tokenizer. Memory does not grow with
the text, except for xz, which compresses it in one piece.
"""

import lzma
from collections.abc import Iterable

import numpy as np

from xfresearch.runtime.errors import UserError

CHUNK = 1 << 20  # bytes of a document that are counted at a time


class ByteTrigram:
    """A byte trigram model with interpolated Witten-Bell smoothing (Chen & Goodman 1998, section 2.5).

        p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab))

    n(x) is a count; t(x) is the number of distinct bytes seen after context x. p(c | b) and p(c) are smoothed the same
    way, and p(c) backs off to 1/256. An unseen context backs off entirely to the next shorter one. Two zero bytes, used
    as context only, precede every document.
    """

    def __init__(self, documents: Iterable[bytes]):
        self.count_3 = trigram_counts(documents)
        self.count_2 = self.count_3.reshape(1 << 8, -1).sum(0)
        self.count_1 = self.count_2.reshape(1 << 8, -1).sum(0)
        self.total_3, self.types_3 = _totals(self.count_3)
        self.total_2, self.types_2 = _totals(self.count_2)
        self.total_1, self.types_1 = _totals(self.count_1)

    def probability(self, first, second, byte):
        """p(byte | first second), float64, for integer arrays of one shape."""
        first, second, byte = (np.asarray(value, np.int64) for value in (first, second, byte))
        p = np.full(byte.shape, 1 / 256)
        p = _interpolate(self.count_1[byte], self.total_1[0], self.types_1[0], p)
        p = _interpolate(self.count_2[second << 8 | byte], self.total_2[second], self.types_2[second], p)
        pair = first << 8 | second
        return _interpolate(self.count_3[pair << 8 | byte], self.total_3[pair], self.types_3[pair], p)


def trigram_counts(documents: Iterable[bytes]) -> np.ndarray:
    """How often each byte follows each pair of bytes: int64[2^24], at index first * 2^16 + second * 2^8 + byte."""
    counts = np.zeros(1 << 24, np.int64)
    for document in documents:
        padded = b"\0\0" + document
        for start in range(0, len(document), CHUNK):
            part = np.frombuffer(padded[start : start + CHUNK + 2], np.uint8).astype(np.int32)
            np.add.at(counts, part[:-2] << 16 | part[1:-1] << 8 | part[2:], 1)
    return counts


def unigram_entropy(train: Iterable[bytes], heldout: Iterable[bytes]) -> float:
    """Cross-entropy of the held-out bytes under the byte frequencies of `train`, with add-one smoothing."""
    return _unigram_bits(trigram_counts(train), _counted(heldout))


def trigram(train: Iterable[bytes], heldout: Iterable[bytes]) -> float:
    """Cross-entropy of the held-out bytes under a ByteTrigram fitted on `train`."""
    return _trigram_bits(ByteTrigram(train), _counted(heldout))


def xz(heldout: list[bytes]) -> float:
    """Size of the concatenated held-out documents after `xz -9`, in bits per byte."""
    return 8 * len(lzma.compress(b"".join(heldout), preset=9)) / sum(map(len, heldout))


def compression_baselines(train: list[bytes], heldout: list[bytes]) -> dict[str, float]:
    """Bits per byte of each baseline by its printed name, weakest first. Raises UserError if `heldout` has no bytes."""
    model = ByteTrigram(train)
    counts = _counted(heldout)
    return {
        "unigram entropy": _unigram_bits(model.count_3, counts),
        "byte trigram": _trigram_bits(model, counts),
        "xz -9": xz(heldout),
    }


def _unigram_bits(train_counts, heldout_counts) -> float:
    train, heldout = (counts.reshape(-1, 256).sum(0) for counts in (train_counts, heldout_counts))
    train = train + 1
    return float(-(heldout @ np.log2(train / train.sum())) / heldout.sum())


def _trigram_bits(model: ByteTrigram, counts) -> float:
    seen = np.flatnonzero(counts)
    p = model.probability(seen >> 16, seen >> 8 & 255, seen & 255)
    return float(-(counts[seen] @ np.log2(p)) / counts.sum())


def _interpolate(count, total, types, shorter):
    # An unseen context has total = types = 0. np.where discards its quotient; max only avoids 0/0.
    return np.where(total > 0, (count + types * shorter) / np.maximum(total + types, 1), shorter)


def _totals(counts):
    """For each context: the number of bytes seen after it, and the number of distinct ones."""
    by_context = counts.reshape(-1, 256)
    return by_context.sum(1, dtype=np.int64), np.count_nonzero(by_context, axis=1)


def _counted(heldout: Iterable[bytes]) -> np.ndarray:
    counts = trigram_counts(heldout)
    if not counts.any():
        raise UserError("the held-out split has no bytes: it must hold at least one byte")
    return counts
