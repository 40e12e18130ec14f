"""From a split's token stream to sequences of L+1 tokens, of which the first L are read and the last L predicted.

Rows are written with `pad` where there is no token. Every token that has a predecessor in its document (packing by
documents) or in the split (one stream) is predicted in exactly one row.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

OPEN_BINS = 32


def stream_rows(tokens: np.ndarray, length: int, pad: int, keep_last: bool) -> Iterator[np.ndarray]:
    """Rows [L+1] of one running stream: row i is tokens[i*L : i*L+L+1]; the last, if incomplete, is padded or dropped."""
    predicted = max(len(tokens) - 1, 0)
    rows = -(-predicted // length) if keep_last else predicted // length
    for i in range(rows):
        row = tokens[i * length : i * length + length + 1]
        yield np.pad(row, (0, length + 1 - len(row)), constant_values=pad)


def document_rows(tokens: np.ndarray, offsets: np.ndarray, length: int, pad: int) -> Iterator[np.ndarray]:
    """Rows [2, L+1] of tokens and segments (from 1; 0 is padding), whole documents side by side.

    Best fit among OPEN_BINS open rows; when no more may be open, the fullest is closed. A document longer than a row
    is cut into pieces that share one token, so that the first token of each piece is predicted in the piece before.
    """
    bins: list[list[np.ndarray]] = []
    room: list[int] = []

    def close(i: int) -> np.ndarray:
        del room[i]
        return _row(bins.pop(i), length, pad)

    for piece in _pieces(tokens, offsets, length):
        fitting = [i for i, left in enumerate(room) if left >= len(piece)]
        if fitting:
            best = min(fitting, key=room.__getitem__)
        else:
            if len(bins) == OPEN_BINS:
                yield close(min(range(OPEN_BINS), key=room.__getitem__))
            bins.append([])
            room.append(length + 1)
            best = len(bins) - 1
        bins[best].append(piece)
        room[best] -= len(piece)
        if room[best] < 2:  # a piece of one token predicts nothing
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
    """Batch of [n, L] arrays from rows [n, 1 or 2, L+1]; without a second layer each row is one segment.

    tokens, targets, segments, positions int32; weights float32, 0 where the target is padding or another segment's.
    """
    tokens = rows[:, 0].astype(np.int32)
    filled = tokens != pad
    segments = rows[:, 1].astype(np.int32) if rows.shape[1] == 2 else filled.astype(np.int32)
    tokens = np.where(filled, tokens, 0)
    same = (segments[:, 1:] == segments[:, :-1]) & filled[:, 1:]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": same.astype(np.float32),
        "segments": segments[:, :-1],
        "positions": _positions(segments[:, :-1]),
    }


def _positions(segments_BL: np.ndarray) -> np.ndarray:
    """Positions [B, L] that start anew at every change of segment."""
    index = np.broadcast_to(np.arange(segments_BL.shape[1], dtype=np.int32), segments_BL.shape)
    starts = np.zeros_like(index)
    starts[:, 1:] = np.where(segments_BL[:, 1:] != segments_BL[:, :-1], index[:, 1:], 0)
    return index - np.maximum.accumulate(starts, axis=1)
