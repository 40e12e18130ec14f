"""The batches of a run on its devices. The thread of the loop places the next batches while an update runs.

It places all batches that have been read, one after the other. If updates run on the CPU, the caches are full of an update's
arrays: the first batch after it takes five times as long to place, or to read, as the next ones.
"""

import time
from collections import deque
from collections.abc import Callable

from xfresearch.data.pipeline import Prefetch


class Feed:
    """Iterator over (step, batch on the devices), from batches that another thread reads. Call `place_ahead` when the update
    of a batch was dispatched. At most `ahead` batches wait on the devices.

    `wait_seconds` is the time in which no update could be dispatched: waiting for the other thread, and placing the batches
    that were not placed ahead, such as the first one.
    """

    def __init__(self, batches: Prefetch, place: Callable[[dict], dict], ahead: int):
        self.wait_seconds = 0.0
        self._batches = batches
        self._place = place
        self._limit = ahead
        self._ahead: deque[tuple[int, dict]] = deque()  # the next (step, batch) that are placed

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> tuple[int, dict]:
        if self._ahead:
            return self._ahead.popleft()
        began = time.perf_counter()
        placed = self._placed()
        self.wait_seconds += time.perf_counter() - began
        return placed

    def place_ahead(self) -> None:
        """If no batch is placed, places those that have been read. It does not wait for one, nor raise the error of reading
        it: the loop first reports and saves the update before."""
        if not self._ahead:
            while len(self._ahead) < self._limit and self._batches.ready():
                self._ahead.append(self._placed())

    def _placed(self) -> tuple[int, dict]:
        step, batch = next(self._batches)
        return step, self._place(batch)

    def close(self) -> None:
        self._batches.close()
