"""Packs the token stream of a split into rows of L+1 tokens: the first L are inputs, the last L are targets.

`pad` fills positions without a token. Every token that has a predecessor in its document ('documents') or in the split
('stream') is the target of exactly one row.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

OPEN_BINS = 32


def stream_rows(tokens: np.ndarray, length: int, pad: int, keep_last: bool) -> Iterator[np.ndarray]:
    """Rows [L+1] of one stream: row i is tokens[i*L : i*L+L+1].

    An incomplete last row is padded with `keep_last`, dropped without.
    """
    rows, left = divmod(max(len(tokens) - 1, 0), length)
    for start in range(0, rows * length, length):
        yield tokens[start : start + length + 1]
    if left and keep_last:
        yield np.pad(tokens[rows * length :], (0, length - left), constant_values=pad)


def document_rows(tokens: np.ndarray, offsets: np.ndarray, length: int, pad: int) -> Iterator[np.ndarray]:
    """Rows [2, L+1] of tokens and segment ids (from 1; 0 is padding). A row holds several whole documents.

    Best-fit bin packing with at most OPEN_BINS open rows; to open another, the fullest is closed. A document longer
    than a row is split into pieces that overlap by one token, so that the first token of a piece is a target of the
    piece before it.
    """
    bins: list[list[np.ndarray]] = []
    free: list[int] = []  # tokens that still fit into each bin

    def close(i: int) -> np.ndarray:
        del free[i]
        return _row(bins.pop(i), length, pad)

    for piece in _pieces(tokens, offsets, length):
        fitting = [i for i, left in enumerate(free) if left >= len(piece)]
        if fitting:
            best = min(fitting, key=free.__getitem__)
        else:
            if len(bins) == OPEN_BINS:
                yield close(min(range(OPEN_BINS), key=free.__getitem__))
            bins.append([])
            free.append(length + 1)
            best = len(bins) - 1
        bins[best].append(piece)
        free[best] -= len(piece)
        if free[best] < 2:  # pieces have at least two tokens: an input and a target
            yield close(best)
    while bins:
        yield close(0)


def _pieces(tokens: np.ndarray, offsets: np.ndarray, length: int) -> Iterator[np.ndarray]:
    for start, end in pairwise(offsets):
        for first in range(start, end - 1, length):
            yield tokens[first : min(first + length + 1, end)]


def _row(pieces: list[np.ndarray], length: int, pad: int) -> np.ndarray:
    row = np.full((2, length + 1), pad, np.int64)
    row[1] = 0
    filled = 0
    for segment, piece in enumerate(pieces, 1):
        row[0, filled : filled + len(piece)] = piece
        row[1, filled : filled + len(piece)] = segment
        filled += len(piece)
    return row


def unpack(rows: np.ndarray, pad: int) -> dict[str, np.ndarray]:
    """A batch of arrays [n, L] from rows [n, 1 or 2, L+1]; without stored segment ids each row is one segment.

    tokens, targets, segments, positions int32; weights float32, 0 where the target is padding or in another segment.
    """
    filled = rows[:, 0] != pad  # before the conversion: 2^32 - 1 is no int32
    segments = rows[:, 1].astype(np.int32) if rows.shape[1] == 2 else filled.astype(np.int32)
    tokens = np.where(filled, rows[:, 0], 0).astype(np.int32)
    same = (segments[:, 1:] == segments[:, :-1]) & filled[:, 1:]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": same.astype(np.float32),
        "segments": segments[:, :-1],
        "positions": positions(segments[:, :-1]),
    }


def positions(segments_BL: np.ndarray) -> np.ndarray:
    """Positions [B, L] that restart at 0 at every change of segment."""
    index = np.broadcast_to(np.arange(segments_BL.shape[1], dtype=np.int32), segments_BL.shape)
    starts = np.zeros_like(index)
    starts[:, 1:] = np.where(segments_BL[:, 1:] != segments_BL[:, :-1], index[:, 1:], 0)
    return index - np.maximum.accumulate(starts, axis=1)
