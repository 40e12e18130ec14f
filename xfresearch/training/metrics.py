"""Metrics of a training run: rows of metrics.jsonl, and a clock of the wall time."""

import json
import math
import os
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import Any

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import (
    exists,
    in_bucket,
    inside,
    move_damaged,
    open_for_appending,
    read_bytes,
    truncate,
    write_bytes,
    write_object,
)
from xfresearch.runtime.schema import ANY, Maybe, check

# Kinds of wall time. The last two are the cost of restarts (`workdir.unproductive_time`).
KINDS = ("step", "input", "evaluation", "checkpoint", "data", "compile", "start", "results", "lost", "down")
ROWS = 1 << 32  # bytes of a metrics.jsonl
NUMBERS: tuple[str, ...] = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "accuracy", "tokens", "bytes")
NUMBERS += ("learning_rate", "gradient_norm", "tokens_per_second", "seconds", "unix_seconds", "skipped")
ROW = {"step": int, "kind": str, "router_load": Maybe({ANY: [[Maybe(float)]]})} | {name: Maybe(float) for name in NUMBERS}
RATE_WINDOW = 20  # updates over which a printed rate is measured
SECONDS_BETWEEN_UPLOADS = 30  # of rows to a bucket


class MetricsLog:
    """Appends rows to `directory`/metrics.jsonl.

    A file in a bucket cannot be appended to: there, the whole file is written again every SECONDS_BETWEEN_UPLOADS and
    by `sync`. Rows after `resume_step` (-1 without a checkpoint) belong to work that an earlier process lost. They are
    dropped, so that the curve of a resumed run equals that of an uninterrupted one, and so are those of `resume_step` whose
    kind is in `again`: they will be written again. A file with other damage than an incomplete last line is moved to
    damaged/ and written again from its intact rows.

    An error of the disk, or any error of a bucket, does not stop the run: it prints a warning, and the rows are written
    again with the next ones.
    """

    def __init__(self, directory, resume_step: int, again: tuple[str, ...] = ()):
        path = inside(directory, "metrics.jsonl")
        self._path = path
        self._errors = Exception if in_bucket(path) else OSError  # gcsfs has errors of its own
        kept = self._kept(resume_step, again) if exists(path) else b""
        self._pending = bytearray(kept if in_bucket(path) else b"")  # in a bucket: the whole file
        self._written = time.monotonic()
        self._file = None if in_bucket(path) else open_for_appending(path)
        self._warned = False
        self.flush()

    def write(self, step: int, kind: str, values: dict) -> None:
        """Writes one row, with the time. `values` are numbers, or dicts and lists of them; one that is not finite becomes
        null."""
        self._pending += _line({"step": step, "kind": kind, "unix_seconds": round(time.time(), 3), **values}).encode()
        if self._file is not None or time.monotonic() - self._written >= SECONDS_BETWEEN_UPLOADS:
            self.flush()

    def sync(self) -> None:
        """Waits until all rows are on the disk. Call it before a checkpoint, whose steps must all have rows."""
        self.flush()
        with suppress(OSError):  # `flush` has warned, or the next one will
            if self._file is not None:
                os.fsync(self._file)

    def flush(self) -> None:
        """Writes all rows so far to the file."""
        try:
            if self._file is None:
                write_object(self._path, bytes(self._pending))
                self._written = time.monotonic()
            while self._file is not None and self._pending:
                del self._pending[: os.write(self._file, self._pending)]
        except self._errors as error:
            if not self._warned:
                print(f"warning: {self._path} cannot be written: {in_words(error)}", file=sys.stderr)
            self._warned = True

    def close(self) -> None:
        self.flush()
        with suppress(OSError):  # `flush` has written every row, or warned
            if self._file is not None:
                os.close(self._file)

    def _kept(self, resume_step: int, again: tuple[str, ...]) -> bytes:
        """Removes the rows after `resume_step` from the file, and its own of the kinds `again`, and returns the others."""

        def keeps(row: dict) -> bool:
            return row["step"] < resume_step or row["step"] == resume_step and row["kind"] not in again

        lines = read_bytes(self._path, ROWS).split(b"\n")[:-1]
        rows = [(_parsed(line), line + b"\n") for line in lines]
        kept = b"".join(line for row, line in rows if row is not None and keeps(row))
        if any(row is None for row, _ in rows):
            move_damaged(self._path, "some of its lines are not rows; the others are kept")
            write_bytes(self._path, kept)
        elif not in_bucket(self._path):
            truncate(self._path, len(kept))  # steps never decrease
        return kept


def in_words(error: Exception) -> str:
    """What went wrong, without the number and the path that an error of the disk has."""
    return getattr(error, "strerror", None) or str(error)


def read_metrics(path) -> list[dict]:
    """The rows of a metrics.jsonl, without an incomplete last line. Raises UserError for any other bad line."""
    lines = read_bytes(path, ROWS).split(b"\n")
    rows = []
    # A whole line ends with a newline: the part after the last newline is empty or incomplete.
    for number, line in enumerate(lines[:-1], start=1):
        row = _parsed(line)
        if row is None:
            raise UserError(f"{path}:{number}: {line[:80]!r} is not a JSON object with step and kind")
        rows.append(row)
    return rows


def last_written(path) -> float:
    """The time of the newest row of a metrics.jsonl; 0 without one. Damaged lines are left out."""
    rows = map(_parsed, reversed(read_bytes(path, ROWS).split(b"\n")[:-1]))
    times = (row.get("unix_seconds") for row in rows if row)
    return next((time for time in times if isinstance(time, float)), 0.0)


def _parsed(line: bytes) -> dict | None:
    """The row in a line; None if the line is damaged."""
    try:
        return check(json.loads(line), ROW, "")
    except (ValueError, UserError, RecursionError):
        return None


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Converts a loss in nats per token to bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


class Silent:
    """Replaces MetricsLog in all processes but the first, which alone writes."""

    def write(self, *_):
        pass

    sync = close = write


class Clock:
    """The wall time of a run by kind, over all its restarts. The share of `step` is the goodput.

    Between `begin` and `end`, time outside any `measure` counts as `step`. Time in a nested `measure` does not count
    for the outer one, so that every second is counted once.
    """

    def __init__(self, now=time.perf_counter):
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.tokens = 0
        self._now = now
        self._last = now()  # up to here, all time has been counted
        self._open: list[str | None] = [None]  # the stack of kinds being measured
        self._set = {}  # the totals given to `set`
        self._rate = Rate()

    def begin(self) -> None:
        """Training starts now."""
        self._count_time()
        self._open[0] = "step"
        self._rate(self.training_seconds(), self.tokens)

    def end(self) -> None:
        """Training is over: time outside any `measure` is no longer counted."""
        self._count_time()
        self._open[0] = None

    @contextmanager
    def measure(self, kind: str):
        """Counts the time of the `with` block as `kind`, one of KINDS."""
        assert kind in KINDS, kind
        self._count_time()
        self._open.append(kind)
        try:
            yield
        finally:
            self._count_time()
            self._open.pop()

    def set(self, kind: str, seconds: float) -> None:
        """Moves time from `step` to `kind`, so that this process has counted `seconds` of it, as measured elsewhere."""
        self._count_time()
        change = seconds - self._set.get(kind, 0.0)
        self._set[kind] = seconds
        self.seconds[kind] += change
        self.seconds["step"] -= change

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def rate(self) -> float:
        """Tokens per second of training (steps and waiting for input) over the last RATE_WINDOW calls."""
        return self._rate(self.training_seconds(), self.tokens)

    def training_seconds(self) -> float:
        """Seconds of training (steps and waiting for input) over the whole run."""
        self._count_time()
        return self.seconds["step"] + self.seconds["input"]

    def tokens_per_second(self) -> float:
        """Tokens per second of training over the whole run."""
        return self.tokens / max(self.training_seconds(), 1e-9)

    def shares(self) -> dict[str, float]:
        """The share of each kind in all counted time; the shares sum to 1."""
        total = self.total_seconds()
        return {kind: seconds / total if total else 0.0 for kind, seconds in self.seconds.items()}

    def state(self) -> dict[str, float]:
        """The state for a checkpoint: seconds of each kind, and tokens."""
        self._count_time()
        return {**self.seconds, "tokens": self.tokens}

    def total_seconds(self) -> float:
        self._count_time()
        return sum(self.seconds.values())

    def restore(self, state: dict[str, float]) -> None:
        """Adds the `state` of earlier processes of the run, or the `unproductive_time` between them."""
        self.tokens += int(state.get("tokens", 0))
        for kind in KINDS:
            self.seconds[kind] += state.get(kind, 0.0)

    def _count_time(self) -> None:
        """Counts the time since the last call for the innermost open kind."""
        now = self._now()
        if self._open[-1]:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now


class Rate:
    """Growth per second of a running total over the last RATE_WINDOW calls; 0 at the first call."""

    def __init__(self):
        self._seen: deque[tuple[float, float]] = deque(maxlen=RATE_WINDOW + 1)

    def __call__(self, seconds: float, total: float) -> float:
        self._seen.append((seconds, total))
        first_seconds, first_total = self._seen[0]
        return (total - first_total) / (seconds - first_seconds) if seconds > first_seconds else 0.0


def _line(row: dict) -> str:
    return json.dumps(plain(row), allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """`value` in JSON's types. A number that is not finite, which JSON cannot write, becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str | bool | int | None):
        return value
    number = value.item() if hasattr(value, "item") else value
    return number if not isinstance(number, float) or math.isfinite(number) else None
