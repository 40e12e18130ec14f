"""Packs pairs into rows for an encoder and a decoder.

A row has S places for sources and L for targets, both with segment ids from 1 (0 is padding): a source and its target
have the same id. A target of n ids, of which the last one ends it, takes n places: the decoder reads the start id and
then all but the last, and predicts all.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from xfresearch.data.packing import OPEN_BINS, positions


class Pair(NamedTuple):
    source: np.ndarray  # int32 [s]
    target: np.ndarray  # int32 [n], with the id that ends it

    @property
    def sizes(self) -> tuple[int, ...]:
        """The places that it takes in each side of a row."""
        return len(self.source), len(self.target)

    def fits(self, source_length: int, length: int) -> bool:
        return len(self.source) <= source_length and len(self.target) <= length


class Sized(Protocol):
    @property
    def sizes(self) -> tuple[int, ...]: ...


Part = TypeVar("Part", bound=Sized)


def packed_rows(parts: Iterable[Part], *places: int) -> Iterator[list[Part]]:
    """The parts, such as pairs, of each row, which has so many `places` in each side for all of them. Best-fit bin packing
    by the places that stay free, with at most OPEN_BINS open rows; to open another, the fullest is closed."""
    bins: list[list[Part]] = []
    free: list[np.ndarray] = []  # places that are left in each side of a row
    for part in parts:
        size = np.array(part.sizes)
        fitting = [i for i, left in enumerate(free) if (size <= left).all()]
        if fitting:
            best = min(fitting, key=lambda i: free[i].sum())
        else:
            if len(bins) == OPEN_BINS:
                fullest = min(range(OPEN_BINS), key=lambda i: free[i].sum())
                del free[fullest]
                yield bins.pop(fullest)
            bins.append([])
            free.append(np.array(places))
            best = len(bins) - 1
        bins[best].append(part)
        free[best] -= size
    yield from bins


def row(pairs: Sequence[Pair], source_length: int, length: int) -> np.ndarray:
    """int32 [2 (S + L)]: sources, their segments, targets, their segments."""
    return np.concatenate([*_side([p.source for p in pairs], source_length), *_side([p.target for p in pairs], length)])


def _side(parts: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    ids, segments = np.zeros(length, np.int32), np.zeros(length, np.int32)
    first = 0
    for number, part in enumerate(parts, 1):
        ids[first : first + len(part)] = part
        segments[first : first + len(part)] = number
        first += len(part)
    return ids, segments


def batch(rows: Sequence[Sequence[Pair]], source_length: int, length: int, start: int) -> dict[str, np.ndarray]:
    """The batch of these rows of pairs, as `unpack` returns it."""
    values = [row(pairs, source_length, length) for pairs in rows]
    stacked = np.array(values, np.int32).reshape(len(rows), 2 * (source_length + length))
    return unpack(stacked, source_length, length, start)


def unpack(rows: np.ndarray, source_length: int, length: int, start: int) -> dict[str, np.ndarray]:
    """A batch from rows [n, 2 (S + L)]: source, source_segments, source_positions int32 [n, S]; tokens, targets, segments,
    positions int32 [n, L] and weights float32 [n, L], 0 for padding. The decoder reads `start` where a target begins."""
    cuts = np.cumsum([source_length, source_length, length])
    source_BS, source_segments_BS, targets_BL, segments_BL = np.split(rows, cuts, axis=1)
    tokens_BL = np.full_like(targets_BL, start)
    goes_on_BL = segments_BL[:, 1:] == segments_BL[:, :-1]
    tokens_BL[:, 1:] = np.where(goes_on_BL, targets_BL[:, :-1], start)
    return {
        "tokens": np.where(segments_BL > 0, tokens_BL, 0),
        "targets": targets_BL,
        "weights": (segments_BL > 0).astype(np.float32),
        "segments": segments_BL,
        "positions": positions(segments_BL),
        "source": source_BS,
        "source_segments": source_segments_BS,
        "source_positions": positions(source_segments_BS),
    }
