"""Records of the reference's pass: the values of taps by name, and changes of them.

Every function of the reference gives `record` the values that it makes on its way. In a `recording` they are kept under the
place that `at` names, and a function of `changes` makes a new value of one of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

_records: list[dict[str, np.ndarray]] = []
_changes: list[dict[str, Callable]] = []
_place: list[str] = []


def record(name: str, value) -> np.ndarray:
    """The value, or what a change makes of it; kept if there is a recording."""
    value = np.asarray(value)
    if not _records:
        return value
    full = ".".join((*_place, name))
    if full in _changes[-1]:
        value = _changes[-1][full](value)
    _records[-1][full] = value
    return value


@contextmanager
def at(memory: str) -> Iterator[None]:
    """Values that are recorded inside have this in front of their names."""
    _place.append(memory)
    try:
        yield
    finally:
        _place.pop()


@contextmanager
def recording(changes: dict[str, Callable] | None = None) -> Iterator[dict[str, np.ndarray]]:
    """{tap: value} of the pass inside, which has the `changes` {tap: function of the value}."""
    _records.append({})
    _changes.append(changes or {})
    try:
        yield _records[-1]
    finally:
        _records.pop()
        _changes.pop()
