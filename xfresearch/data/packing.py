"""Packs the token stream of a split into rows of L+1 tokens: the first L are inputs, the last L are targets.

Rows are not stored: `Rows` says which parts of the stream each has. Every token that has a predecessor in its document
('documents') or in the stream ('stream') is the target of exactly one row.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

OPEN_BINS = 32


class Rows(NamedTuple):
    """Row i has the pieces firsts[i] to firsts[i + 1] - 1: piece k is `lengths[k]` tokens from `starts[k]` on."""

    starts: np.ndarray  # int64
    lengths: np.ndarray  # int64
    firsts: np.ndarray  # int64, one more than there are rows


def stream_rows(n_tokens: int, length: int, keep_last: bool) -> Rows:
    """Rows of one stream: row i is tokens[i*L : i*L+L+1]. An incomplete last row is kept, and padded, with `keep_last`."""
    targets = max(n_tokens - 1, 0)
    count = -(-targets // length) if keep_last else targets // length
    starts = np.arange(count, dtype=np.int64) * length
    return Rows(starts, np.minimum(length + 1, n_tokens - starts), np.arange(count + 1, dtype=np.int64))


def document_rows(sizes: np.ndarray, length: int) -> Rows:
    """Rows of several whole documents, which have `sizes` tokens.

    Best-fit bin packing with at most OPEN_BINS open rows; to open another, the fullest is closed. A document longer
    than a row is split into pieces that overlap by one token, so that the first token of a piece is a target of the
    piece before it.
    """
    bins: list[list[tuple[int, int]]] = []
    free: list[int] = []  # tokens that still fit into each bin
    closed: list[list[tuple[int, int]]] = []

    def close(i: int) -> None:
        del free[i]
        closed.append(bins.pop(i))

    for start, size in _pieces(sizes, length):
        fitting = [i for i, left in enumerate(free) if left >= size]
        if fitting:
            best = min(fitting, key=free.__getitem__)
        else:
            if len(bins) == OPEN_BINS:
                close(min(range(OPEN_BINS), key=free.__getitem__))
            bins.append([])
            free.append(length + 1)
            best = len(bins) - 1
        bins[best].append((start, size))
        free[best] -= size
        if free[best] < 2:  # pieces have at least two tokens: an input and a target
            close(best)
    closed += bins
    pieces = np.array([piece for row in closed for piece in row], np.int64).reshape(-1, 2)
    return Rows(pieces[:, 0], pieces[:, 1], np.cumsum([0, *map(len, closed)], dtype=np.int64))


def _pieces(sizes: np.ndarray, length: int):
    """(start, size) of each document, or of each of its pieces."""
    for start, end in pairwise(np.cumsum([0, *sizes.tolist()]).tolist()):
        for first in range(start, end - 1, length):
            yield first, min(length + 1, end - first)


def lay_out(rows: Rows, chosen: np.ndarray, read: Callable, length: int, pad: int) -> np.ndarray:
    """The `chosen` rows as int64 [n, 2, L+1]: tokens, with `pad` where there are none, and segment ids from 1; 0 is padding.
    read(starts, lengths) gives the tokens of pieces, one after the other."""
    counts = rows.firsts[chosen + 1] - rows.firsts[chosen]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its row
    pieces = np.repeat(rows.firsts[chosen], counts) + number
    sizes = rows.lengths[pieces]
    before = np.cumsum(sizes) - sizes
    in_row = before - np.repeat(before[np.cumsum(counts) - counts], counts) if len(pieces) else before
    starts = np.repeat(np.arange(len(chosen)), counts) * (length + 1) + in_row
    places = np.repeat(starts - before, sizes) + np.arange(sizes.sum())
    laid = np.zeros((2, len(chosen) * (length + 1)), np.int64)
    laid[0] = pad
    laid[0, places] = read(rows.starts[pieces], sizes)
    laid[1, places] = np.repeat(number + 1, sizes)
    return laid.reshape(2, len(chosen), length + 1).transpose(1, 0, 2)


def unpack(rows: np.ndarray, pad: int) -> dict[str, np.ndarray]:
    """A batch of arrays [n, L] from rows [n, 2, L+1] of `lay_out`.

    tokens, targets, segments, positions int32; weights float32, 0 where the target is padding or in another segment.
    """
    filled = rows[:, 0] != pad  # before the conversion: 2^32 - 1 is no int32
    segments = rows[:, 1].astype(np.int32)
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
