"""The newest intact checkpoint."""

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from xfresearch.checkpoints.store import Corrupt

T = TypeVar("T")


def newest_intact(steps: Iterable[int], read: Callable[[int], T], where: str = "") -> tuple[int, T] | None:
    """(step, read(step)) of the last of `steps` (ascending) for which `read` does not raise Corrupt; None if there is
    none.

    A warning on standard error names each damaged checkpoint, with `where` in front.
    """
    for step in reversed(list(steps)):
        try:
            return step, read(step)
        except Corrupt as error:
            print(f"warning: {where}{error}; trying the one before", file=sys.stderr)
    return None
