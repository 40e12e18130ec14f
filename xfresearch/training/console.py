"""The progress of a run on standard error: a bar on a terminal and in a notebook, otherwise lines that a log file holds."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from xfresearch.runtime.progress import SECONDS_BETWEEN_LINES
from xfresearch.runtime.terminal import bar, shows_bars, unfiltered
from xfresearch.training.callbacks import Callback, Start
from xfresearch.training.metrics import bits_per_byte

LAYOUT = "step {n_fmt}/{total_fmt} {bar} {postfix}  {remaining} left"


class Console(Callback):
    """Prints the outline, the progress every SECONDS_BETWEEN_LINES (a bar shows it all the time), and each held-out loss
    with the best so far."""

    def __init__(self) -> None:
        self._line = ""  # the latest line, until it is printed
        self._bar: Any = None
        self._printed_at = -math.inf

    def on_outline(self, outline: str) -> None:
        print(outline, file=sys.stderr, flush=True)

    def on_start(self, start: Start) -> None:
        self._start, self._step, self._total = start, start.step, start.config.steps
        self._began = time.monotonic()
        if shows_bars():
            self._bar = bar(total=self._total, initial=start.step, bar_format=LAYOUT, dynamic_ncols=True)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        now, loss, self._step = time.monotonic(), figures["loss"], step
        bytes_per_token = self._start.bytes_per_token
        bits = f"{bits_per_byte(loss, bytes_per_token):.3f} bits/byte  " if bytes_per_token else ""
        text = f"loss {loss:.3f}  {bits}{figures['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        self._line = f"{self._at(step)}  {text}  {self._left(now)} left"
        if now - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._print(now)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._step = step
        parts = [self._at(step), f"held-out loss {figures['loss']:.4f}"]
        if "bits_per_byte" in figures:
            parts.append(f"{figures['bits_per_byte']:.3f} bits/byte")
        if "best_step" in figures:
            parts.append(f"best {figures['best_loss']:.4f} at step {figures['best_step']}")
        self._say("  ".join([*parts, f"{self._left(time.monotonic())} left"]))

    def on_end(self, step: int, reason: str) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._line:
            self._print(time.monotonic())

    def _at(self, step: int) -> str:
        return f"step {step}/{self._total}"

    def _left(self, now: float) -> str:
        """The time that the updates left take, as long as those so far; of a run that has just resumed it is not known."""
        from tqdm import tqdm

        made = self._step - self._start.step
        return tqdm.format_interval((self._total - self._step) * (now - self._began) / made) if made else "?"

    def _say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=unfiltered(sys.stderr))
        else:
            print(line, file=sys.stderr, flush=True)

    def _print(self, now: float) -> None:
        print(self._line, file=sys.stderr, flush=True)
        self._printed_at = now
        self._line = ""
