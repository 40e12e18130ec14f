"""The progress of work before and after training, on standard error: a stage is one line of text and its time.

On a terminal and in a notebook, a bar shows a stage while it runs. Elsewhere a line follows every SECONDS_BETWEEN_LINES.
Both also move while the stage waits for a library that reports nothing, such as the compiler. Only process 0 prints.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xfresearch.runtime import distributed
from xfresearch.runtime.tables import count
from xfresearch.runtime.terminal import bar, one_line, shows_bars

SECONDS_BETWEEN_LINES = 10  # if standard error is not a terminal
_opened: list["Stage"] = []  # the stages that run now: a stage inside another one prints nothing


class Stage:
    """A stage of `total` units (None: not known), of which `update` counts those that are done."""

    def __init__(self, title: str, total: int | None, unit: str):
        self.title = one_line(title)
        self.total = None if total is None else int(total)  # that of tensorflow_datasets cannot be added to a float
        self.unit = unit
        self.done = 0
        self.note = ""  # more about what is done
        self._began = self._printed = time.monotonic()
        self._bar: Any = None  # of tqdm

    def update(self, count: int) -> None:
        self.done += int(count)

    def extend(self, count: int) -> None:
        """Adds units to the total, if it is known."""
        if self.total is not None:
            self.total += count

    def line(self, running: bool = True) -> str:
        """'tokenising notes train: 12.3 MB of 102 MB, 12.0 s'."""
        total = f" of {amount(self.total, self.unit)}" if running and self.total else ""
        done = f"{amount(self.done, self.unit)}{total}, " if self.done else ""
        seconds = time.monotonic() - self._began
        if running and self.total and self.note and self.done:
            left = (self.total - self.done) * seconds / self.done
            rate = amount(round(self.done / max(seconds, 1e-9)), self.unit)
            done += f"{self.done / self.total:.0%}, {rate}/s, {left:,.0f} s left, {self.note}, "
        return f"{self.title}: {done}{seconds:.1f} s"

    def show(self) -> None:
        """Shows the progress if it is time to."""
        now = time.monotonic()
        if shows_bars():
            self._show_bar()
        elif now - self._printed >= SECONDS_BETWEEN_LINES:
            print(self.line(), file=sys.stderr, flush=True)
            self._printed = now

    def _show_bar(self) -> None:
        if self._bar is None:
            layout = None if self.total else "{desc}: {elapsed}"
            scale = {"unit": self.unit, "unit_scale": self.unit == "B"}
            self._bar = bar(desc=self.title, total=self.total, bar_format=layout, leave=False, **scale)
        self._bar.n, self._bar.total = self.done, self.total
        self._bar.set_postfix_str(self.note, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def stage(title: str, total: int | None = None, unit: str = "B") -> Iterator[Stage]:
    """Shows the `with` block as a stage. It yields the Stage, whose `update` counts what is done."""
    current = Stage(title, total, unit)
    if _opened or not distributed.first():
        yield current
        return
    ended = threading.Event()

    def show_until_ended():
        while not ended.wait(0.5):
            current.show()

    watcher = threading.Thread(target=show_until_ended, daemon=True)
    _opened.append(current)
    watcher.start()
    try:
        yield current
    finally:
        ended.set()
        watcher.join()
        _opened.remove(current)
        current.close()
    print(current.line(running=False), file=sys.stderr, flush=True)


def amount(number: int, unit: str) -> str:
    """A number of units: '12.3 MB', '1,200 sequences'."""
    if unit != "B":
        return f"{number:,} {unit}"
    return f"{count(number, 'G')}B" if number >= 1000 else f"{number} B"
