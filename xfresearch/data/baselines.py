"""Compression baselines: unigram entropy, byte trigram, xz.

Each takes documents as bytes and returns bits per held-out byte. None depends on a tokenizer.
"""

import lzma

import numpy as np

from xfresearch.errors import UserError


class ByteTrigram:
    """A byte trigram model with interpolated Witten-Bell smoothing (Chen & Goodman 1998, section 2.5).

        p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab))

    n(x) is a count; t(x) is the number of distinct bytes seen after context x. p(c | b) and p(c) are smoothed the same
    way, and p(c) backs off to 1/256. An unseen context backs off entirely to the next shorter one. Two zero bytes, used
    as context only, precede every document.
    """

    def __init__(self, documents: list[bytes]):
        first, second, byte = _windows(documents)
        self.count_3 = np.bincount(first << 16 | second << 8 | byte, minlength=1 << 24).astype(np.int32)
        self.count_2 = np.bincount(second << 8 | byte, minlength=1 << 16)
        self.count_1 = np.bincount(byte, minlength=1 << 8)
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


def unigram_entropy(train: list[bytes], heldout: list[bytes]) -> float:
    """Cross-entropy of the held-out bytes under the byte frequencies of `train`, with add-one smoothing."""
    counts = np.bincount(_bytes(train), minlength=256) + 1
    heldout_counts = np.bincount(_bytes(heldout), minlength=256)
    return float(-(heldout_counts @ np.log2(counts / counts.sum())) / _size(heldout))


def trigram(train: list[bytes], heldout: list[bytes]) -> float:
    """Cross-entropy of the held-out bytes under a ByteTrigram fitted on `train`."""
    return float(-np.log2(ByteTrigram(train).probability(*_windows(heldout))).sum() / _size(heldout))


def xz(heldout: list[bytes]) -> float:
    """Size of the concatenated held-out documents after `xz -9`, in bits per byte."""
    return 8 * len(lzma.compress(b"".join(heldout), preset=9)) / _size(heldout)


def compression_baselines(train: list[bytes], heldout: list[bytes]) -> dict[str, float]:
    """Bits per byte of each baseline by its printed name, weakest first. Raises UserError if `heldout` has no bytes."""
    return {
        "unigram entropy": unigram_entropy(train, heldout),
        "byte trigram": trigram(train, heldout),
        "xz -9": xz(heldout),
    }


def _interpolate(count, total, types, shorter):
    # An unseen context has total = types = 0. np.where discards its quotient; max only avoids 0/0.
    return np.where(total > 0, (count + types * shorter) / np.maximum(total + types, 1), shorter)


def _totals(counts):
    """For each context: the number of bytes seen after it, and the number of distinct ones."""
    by_context = counts.reshape(-1, 256)
    return by_context.sum(1, dtype=np.int64), np.count_nonzero(by_context, axis=1)


def _windows(documents: list[bytes]):
    """Every byte of the documents after its two predecessors: three int32 arrays [bytes]."""
    padded = np.frombuffer(b"".join(b"\0\0" + document for document in documents), np.uint8).astype(np.int32)
    lengths = np.array([len(document) + 2 for document in documents], np.int64)
    starts = np.cumsum(lengths) - lengths
    predicted = np.ones(len(padded), bool)
    predicted[starts] = False
    predicted[starts + 1] = False
    at = np.flatnonzero(predicted)
    return padded[at - 2], padded[at - 1], padded[at]


def _bytes(documents: list[bytes]):
    return np.frombuffer(b"".join(documents), np.uint8)


def _size(heldout: list[bytes]) -> int:
    size = sum(map(len, heldout))
    if not size:
        raise UserError(f"the held-out split has {len(heldout)} documents and no bytes: it must hold at least one byte")
    return size
