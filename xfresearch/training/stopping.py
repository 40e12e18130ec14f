"""Notices to stop: SIGTERM, which a preempted machine gets, and Ctrl-C. The training loop saves before it stops."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache

from xfresearch.runtime import distributed


class Interrupted(Exception):
    """A notice to stop came before the last batch of an evaluation."""


def until(stopping, batches: Iterator[dict]) -> Iterator[dict]:
    """`batches`; raises Interrupted at a notice to stop, if there is a StopSignal or PreemptionNotice."""
    for batch in batches:
        if stopping and stopping.reached():
            raise Interrupted
        yield batch


def _handled(by: Callable, *signals: signal.Signals) -> dict:
    """{signal: its handler before}. Python gives signals to the main thread alone: {} in another one."""
    if threading.current_thread() is threading.main_thread():
        return {each: signal.signal(each, by) for each in signals}
    _say_unhandled()
    return {}


@cache
def _say_unhandled() -> None:
    """Once in a process."""
    print("this trains in another thread than the main one: Ctrl-C and SIGTERM do not save it first", file=sys.stderr)


class StopSignal:
    """Records SIGTERM or SIGINT, so that the loop can save before it stops. A second SIGINT ends the process. Neither is
    recorded in another thread than the main one."""

    def __init__(self):
        self.received = ""
        self.previous = _handled(self._record, signal.SIGTERM, signal.SIGINT)

    def _record(self, number, frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def reached(self) -> bool:
        """Whether to stop."""
        return bool(self.received)

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class PreemptionNotice:
    """StopSignal for several processes: a signal to any of them stops all of them after the same update.

    JAX handles SIGTERM (distributed.handle_preemption) and makes all processes agree on the step. SIGINT is turned into
    SIGTERM; a second SIGINT ends the process at once.
    """

    def __init__(self):
        self.received = ""
        self._interrupts = 0
        self._asked = 0
        self.previous = _handled(self._interrupt, signal.SIGINT)

    def _interrupt(self, number, frame):
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)

    def reached(self) -> bool:
        """Whether to stop. Every process must call this as often as the others, and after every update."""
        from jax.experimental import multihost_utils

        if self.received:
            return True
        # JAX counts calls from 0, not steps: it answers a notice that came before the first call with 0.
        if multihost_utils.reached_preemption_sync_point(self._asked):
            self.received = "SIGTERM"
        self._asked += 1
        return bool(self.received)

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if not self.received:  # after a notice, this process may still get its own SIGTERM
            distributed.handle_preemption(False)
