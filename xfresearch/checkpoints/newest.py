"""The newest good checkpoint."""

import sys
from collections.abc import Callable
from typing import TypeVar

from xfresearch.checkpoints.validity import Unusable

T = TypeVar("T")


def newest_good(steps: Callable[[], list[int]], read: Callable[[int], T], where: str = "") -> tuple[int, T] | None:
    """(step, read(step)) of the last of `steps()` (ascending) for which `read` does not raise Unusable; None if there is
    none. The steps are listed again after each failure: a run may have deleted some, and saved newer ones.

    A warning on standard error names each checkpoint that could not be used, with `where` in front.
    """
    tried = set()
    while left := [step for step in steps() if step not in tried]:
        tried.add(left[-1])
        try:
            return left[-1], read(left[-1])
        except Unusable as error:
            print(f"warning: {where}{error}; trying another", file=sys.stderr)
    return None
