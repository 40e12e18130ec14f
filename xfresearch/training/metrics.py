"""What a run says about itself while it trains: rows of metrics.jsonl, TensorBoard, the progress bar, where time goes."""

import json
import math
import sys
import time
from collections import deque
from contextlib import contextmanager

from etils import epath

from xfresearch.checkpoints.store import in_bucket
from xfresearch.errors import UserError
from xfresearch.files import write_text

# Where time goes: what a process measures, and what restarts took (`workdir.time_gone`).
KINDS = ("step", "input", "evaluation", "checkpoint", "compile", "start", "lost", "down")
RATE_WINDOW = 20  # updates that a printed rate looks back on
SECONDS_BETWEEN_LINES = 10  # of progress, where standard error is not a terminal
SECONDS_BETWEEN_UPLOADS = 30  # of rows to a bucket


class MetricsLog:
    """Appends rows to `directory`/metrics.jsonl, and to TensorBoard event files in `directory`/tensorboard.

    A file in a bucket cannot be appended to: there the whole is written anew, now and then and by `flush`. Rows after
    `resume_step` are of work that was lost with an earlier process: they are dropped, so that the curve of a resumed run is
    that of the unbroken one.
    """

    def __init__(self, directory, resume_step: int, tensorboard: bool):
        path = epath.Path(directory) / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["step"] <= resume_step] if path.exists() else []
        write_text(path, "".join(_line(row) for row in rows))
        self._path, self._lines, self._written = path, [_line(row) for row in rows], time.monotonic()
        self._file = None if in_bucket(path) else path.open("a")
        self._events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            events = str(path.parent / "tensorboard")
            self._events = SummaryWriter(events, purge_step=resume_step + 1, filename_suffix=f".{resume_step}")

    def write(self, step: int, kind: str, values: dict) -> None:
        """One row. `values`: numbers, or dicts and lists of them; null in the file where a number is not finite."""
        line = _line({"step": step, "kind": kind, **values})
        if self._file:
            self._file.write(line)
            self._file.flush()
        else:
            self._lines.append(line)
            if time.monotonic() - self._written >= SECONDS_BETWEEN_UPLOADS:
                self.flush()
        if self._events:
            for name, value in _scalars(kind, values):
                self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """All rows so far are in the file when this returns: to be called before a checkpoint, which they have to reach."""
        if not self._file:
            self._path.write_text("".join(self._lines))
            self._written = time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file:
            self._file.close()
        if self._events:
            self._events.close()


def read_metrics(path) -> list[dict]:
    """The rows of a metrics.jsonl. A last line that a kill cut short is left out; UserError for any other bad line."""
    lines = epath.Path(path).read_text().split("\n")
    rows = []
    for number, line in enumerate(
        lines[:-1], start=1
    ):  # a whole line ends with a newline: what follows the last is torn
        try:
            row = json.loads(line)
            row["step"], row["kind"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}:{number}: {line[:80]!r} is not a JSON object with step and kind") from error
        rows.append(row)
    return rows


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


class Silent:
    """In place of MetricsLog and Progress in every process but the first: the files and the screen are that one's."""

    def write(self, *_):
        pass

    update = flush = close = write


class Progress:
    """The progress of a run on standard error: a bar on a terminal, elsewhere a plain line now and then."""

    def __init__(self, total_steps: int, start_step: int, bytes_per_token: float | None):
        """`bytes_per_token` is None where tokens are not of a text."""
        from tqdm import tqdm

        self.total, self.start, self.bytes_per_token = total_steps, start_step, bytes_per_token
        self._rate, self._began, self._tokens = Rate(), time.monotonic(), 0
        self._rate(self._began, 0)
        self._shown, self._unshown = -math.inf, ""
        self._bar = None
        if sys.stderr.isatty():
            layout = "step {n_fmt}/{total_fmt} {bar} {postfix}  {remaining} left"
            self._bar = tqdm(total=total_steps, initial=start_step, bar_format=layout, dynamic_ncols=True)

    def update(self, step: int, loss: float, tokens: int) -> None:
        """Update number `step` is done: it saw `tokens` tokens at `loss` nats each."""
        now = time.monotonic()
        self._tokens += tokens
        bits = f"{bits_per_byte(loss, self.bytes_per_token):.3f} bits/byte  " if self.bytes_per_token else ""
        text = f"loss {loss:.3f}  {bits}{self._rate(now, self._tokens):,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        left = (self.total - step) * (now - self._began) / max(step - self.start, 1)
        self._unshown = f"step {step}/{self.total}  {text}  {_minutes(left)} left"
        if now - self._shown >= SECONDS_BETWEEN_LINES:
            self._show(now)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._bar.close()
        elif self._unshown:
            self._show(time.monotonic())

    def _show(self, now: float) -> None:
        print(self._unshown, file=sys.stderr, flush=True)
        self._shown, self._unshown = now, ""


class Clock:
    """Where the wall time of a run goes, over all its restarts. The share of `step` is its goodput.

    From `begin` to `end`, time that no `measure` claims is the step's. A measure inside another one takes its time away from
    the outer one, so that every second is counted once.
    """

    def __init__(self, now=time.perf_counter):
        self.seconds, self.tokens = dict.fromkeys(KINDS, 0.0), 0
        self._now, self._mark, self._open = now, now(), [None]
        self._elsewhere, self._rate = {}, Rate()

    def begin(self) -> None:
        """Training starts now."""
        self._charge()
        self._open[0] = "step"
        self._rate(self._training_seconds(), self.tokens)

    def end(self) -> None:
        """Training is over: time that no `measure` claims is nobody's again."""
        self._charge()
        self._open[0] = None

    @contextmanager
    def measure(self, kind: str):
        """Counts the time of the `with` block as `kind`, one of KINDS."""
        assert kind in KINDS, kind
        self._charge()
        self._open.append(kind)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def set(self, kind: str, seconds: float) -> None:
        """`seconds` of this process's steps until now were really of `kind`, as measured by someone else."""
        self._charge()
        more = seconds - self._elsewhere.get(kind, 0.0)
        self._elsewhere[kind] = seconds
        self.seconds[kind] += more
        self.seconds["step"] -= more

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def rate(self) -> float:
        """Tokens per second of training (steps and waiting for input) over the last RATE_WINDOW calls."""
        self._charge()
        return self._rate(self._training_seconds(), self.tokens)

    def tokens_per_second(self) -> float:
        """The same over the whole run."""
        self._charge()
        return self.tokens / max(self._training_seconds(), 1e-9)

    def shares(self) -> dict[str, float]:
        """The share of all counted time that each kind took; they sum to 1."""
        total = self.seconds_in_all()
        return {kind: seconds / total if total else 0.0 for kind, seconds in self.seconds.items()}

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: seconds of each kind, and tokens."""
        self._charge()
        return {**self.seconds, "tokens": self.tokens}

    def seconds_in_all(self) -> float:
        self._charge()
        return sum(self.seconds.values())

    def restore(self, state: dict[str, float]) -> None:
        """Adds what earlier processes of the run have counted, or `time_gone` between them; {} for a fresh run."""
        self.tokens += int(state.get("tokens", 0))
        for kind in KINDS:
            self.seconds[kind] += state.get(kind, 0.0)

    def _training_seconds(self) -> float:
        return self.seconds["step"] + self.seconds["input"]

    def _charge(self) -> None:
        now = self._now()
        if self._open[-1]:
            self.seconds[self._open[-1]] += now - self._mark
        self._mark = now


class Rate:
    """Growth per second of a running total, over the last RATE_WINDOW calls; 0 at the first."""

    def __init__(self):
        self._seen = deque(maxlen=RATE_WINDOW + 1)

    def __call__(self, seconds: float, total: float) -> float:
        self._seen.append((seconds, total))
        first_seconds, first_total = self._seen[0]
        return (total - first_total) / (seconds - first_seconds) if seconds > first_seconds else 0.0


def _line(row: dict) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value):
    """`value` in JSON's own types, with None where a number is not finite (JSON has no word for it)."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool | int | None):
        return value
    number = value.item() if hasattr(value, "item") else value
    return number if not isinstance(number, float) or math.isfinite(number) else None


def _scalars(name: str, value):
    """Every number in nested dicts and lists, with its path as TensorBoard's tag."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _scalars(f"{name}/{key}", item)
    else:
        yield name, value


def _minutes(seconds: float) -> str:
    from tqdm import tqdm

    return tqdm.format_interval(seconds)
