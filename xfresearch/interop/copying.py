"""Copies between their matrices and ours, which are often each other's transposes and cut over devices."""

import numpy as np

BLOCK = 16  # float32 in a cache line


def copy(target: np.ndarray, values: np.ndarray) -> None:
    """target[...] = values, which may be in another dtype and order in memory.

    NumPy's own loop would write each number of a transpose to a cache line of its own: here a few rows of `values` are
    brought to the dtype of `target` and then written a line at a time, which takes 0.4 of the time.
    """
    if target.ndim < 2:
        target[...] = values
        return
    last = _innermost(target)
    target, values = np.moveaxis(target, last, -1), np.moveaxis(values, last, -1)
    inner = _innermost(values)
    if inner == values.ndim - 1:
        target[...] = values
    elif values.ndim > 2:
        outer = 1 if inner == 0 else 0
        for part, its_values in zip(np.moveaxis(target, outer, 0), np.moveaxis(values, outer, 0), strict=True):
            copy(part, its_values)
    else:
        for start in range(0, values.shape[1], BLOCK):
            rows = values[:, start : start + BLOCK].astype(target.dtype, order="K")
            target[:, start : start + BLOCK] = rows


def _innermost(array: np.ndarray) -> int:
    """The axis whose numbers lie closest together; the last one where none has more than one."""
    axes = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    return min(axes, key=lambda axis: array.strides[axis], default=array.ndim - 1)


Bounds = tuple[tuple[int, int], ...]  # of a device's piece of an array: where it starts and stops in each dimension


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def within(bounds: Bounds, index: tuple[int, ...]) -> tuple[tuple, tuple] | None:
    """What a piece holds of the part of an array at `index` in its first dimensions: where that stands in the piece, and
    the cut of the part's own dimensions that it is. None where it holds nothing of it."""
    own, rest = bounds[: len(index)], bounds[len(index) :]
    if not all(start <= i < stop for i, (start, stop) in zip(index, own, strict=True)):
        return None
    at = tuple(i - start for i, (start, _) in zip(index, own, strict=True))
    return at, tuple(slice(start, stop) for start, stop in rest)
