"""The batches of a run on its devices. The thread of the loop places the next batch while the update before it runs."""

import time
from collections.abc import Callable

from xfresearch.data.pipeline import Prefetch


class Feed:
    """Iterator over (step, batch on the devices), from batches that another thread reads. Call `place_ahead` when the update
    of a batch was dispatched.

    `wait_seconds` is the time in which no update could be dispatched: waiting for the other thread, and placing the batches
    that were not placed ahead, such as the first one.
    """

    def __init__(self, batches: Prefetch, place: Callable[[dict], dict]):
        self.wait_seconds = 0.0
        self._batches = batches
        self._place = place
        self._ahead = None  # the next (step, batch), if it is placed

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> tuple[int, dict]:
        if self._ahead is None:
            began = time.perf_counter()
            found = self._placed()
            self.wait_seconds += time.perf_counter() - began
        else:
            found, self._ahead = self._ahead, None
        return found

    def place_ahead(self) -> None:
        """Places the next batch if it has been read. It does not wait for one, nor raise the error of reading it: the loop
        first reports and saves the update before."""
        if self._ahead is None and self._batches.ready():
            self._ahead = self._placed()

    def _placed(self) -> tuple[int, dict]:
        step, batch = next(self._batches)
        return step, self._place(batch)

    def close(self) -> None:
        self._batches.close()
