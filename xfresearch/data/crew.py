"""Makes shards in other processes (shard_worker.py), while the caller goes on or waits."""

import atexit
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from xfresearch.data.corpus_inputs import Shard
from xfresearch.data.making import cores
from xfresearch.data.shard_writers import POLL, Writers
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import Stage

_RENEWED = 16  # shards, after which a worker is replaced


class Work(Protocol):
    """What a crew makes: prepared.Prepared."""

    folder: Any

    @property
    def shards(self) -> Sequence[Shard]: ...

    def manifest(self, number: int) -> Any:
        """None if the shard is not there."""

    def request(self) -> dict[str, Any]:
        """What a worker must know to make shards."""


class Crew:
    """The workers of a Prepared corpus, which make the shards of a queue in order."""

    def __init__(self, work: Work, workers: int):
        self._work, self._most = work, workers or cores()
        self._queue: list[int] = []
        self._busy: dict[int, int] = {}  # bytes that are done, of each shard that is being made
        self._changed = threading.Condition()
        self._drivers: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._writers: Writers | None = None
        self.by_others = 0  # shards that are being made elsewhere

    def want(self, numbers: Sequence[int], first: bool) -> None:
        """Puts shards into the queue, at its beginning or at its end, and starts the workers."""
        with self._changed:
            rest = [n for n in self._queue if n not in set(numbers)] if first else self._queue
            known = set(self._queue) | set(self._busy)
            new = [n for n in numbers if n not in self._busy] if first else [n for n in numbers if n not in known]
            self._queue = [*new, *rest] if first else [*rest, *new]
            self._writers = self._writers or Writers(self._work.folder)
            for _ in range(min(self._most - len(self._drivers), len(self._queue))):
                self._drivers.append(threading.Thread(target=self._drive, daemon=True))
                self._drivers[-1].start()

    def wait(self, numbers: Sequence[int], bar: Stage) -> None:
        """Returns when these shards are there. Raises what a worker, or this process, met."""
        sizes = {number: self._work.shards[number] for number in numbers}
        files = sum(len(shard.inputs) for shard in sizes.values())
        waiting = list(numbers)
        while waiting:
            with self._changed:
                self._changed.wait(POLL)
                if self._error:
                    raise self._error
                going = sum(min(done, sizes[n].size) for n, done in self._busy.items() if n in sizes)
            waiting = [number for number in waiting if self._work.manifest(number) is None]
            there = [sizes[number] for number in numbers if number not in waiting]
            bar.done = sum(shard.size for shard in there) + going
            elsewhere = f", {self.by_others} shards by other processes" if self.by_others else ""
            bar.note = f"{sum(len(shard.inputs) for shard in there):,} of {files:,} inputs{elsewhere}"
        with self._changed:
            # What is busy may be a shard that is there already: until this process is no writer any more.
            while self._writers and not self._error and not self._queue and self._busy.keys() <= sizes.keys():
                self._changed.wait(POLL)

    def _drive(self) -> None:
        """Makes shards in a worker until there is none to make."""
        worker, made = None, 0
        try:
            while (number := self._next()) is not None:
                try:
                    if worker is None or made == _RENEWED:
                        worker, made = self._replaced(worker), 0
                    worker.make(self._work.shards[number], self._counter(number))
                    made += 1
                    if self._work.manifest(number) is None:
                        raise OSError(errno.EIO, "a shard is not as it was written", str(self._work.folder))
                finally:
                    self._end(number)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._close_if_idle()
        finally:
            if worker:
                worker.stop()

    def _replaced(self, worker: "_Worker | None") -> "_Worker":
        if worker:
            worker.stop()
        return _Worker(self._work, max(1, self._most // max(len(self._drivers), 1)))

    def _next(self) -> int | None:
        """The next shard that no other process makes. Waits while others make all that are left."""
        while True:
            with self._changed:
                if self._error or not self._writers:
                    self._close_if_idle()
                    return None
                elsewhere = self._writers.others()
                self.by_others = len(elsewhere)
                for number in [each for each in self._queue if each not in elsewhere]:
                    if self._work.manifest(number) is not None:
                        self._queue.remove(number)
                    elif self._writers.take(number):
                        self._queue.remove(number)
                        self._busy[number] = 0
                        return number
                if not self._queue:
                    self._close_if_idle()
                    return None
                self._changed.wait(POLL)

    def _close_if_idle(self) -> None:
        """Ends this thread's part in the work. The last one says that this process makes no shard any more."""
        self._drivers = [each for each in self._drivers if each is not threading.current_thread()]
        if not self._busy and self._writers and (self._error or not self._queue):
            self._writers.close()
            self._writers = None
        self._changed.notify_all()

    def _end(self, number: int) -> None:
        with self._changed:
            del self._busy[number]
            if self._writers:
                self._writers.leave(number)
            self._changed.notify_all()

    def _counter(self, number: int) -> Callable[[int], None]:
        def count(size: int) -> None:
            self._busy[number] += size

        return count


class _Worker:
    """A process that makes shards, one after another."""

    def __init__(self, work: Work, threads: int):
        places = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": places, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "xfresearch.data.shard_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        atexit.register(self.stop)
        self._write(work.request() | {"threads": threads})

    def make(self, shard: Shard, count: Callable[[int], None]) -> None:
        """Raises UserError, OSError, or another error with the stack trace of the worker."""
        inputs = [each.found for each in shard.inputs]
        self._write({"number": shard.number, "samples": shard.samples, "inputs": inputs})
        assert self._process.stdout
        for line in self._process.stdout:
            answer = json.loads(line)
            if "done" in answer:
                count(answer["done"])
            elif "made" in answer:
                return
            elif answer["mistake"]:
                raise UserError(answer["error"])
            elif answer["errno"]:
                raise OSError(answer["errno"], answer["error"], answer["where"])
            else:
                raise RuntimeError(answer["error"])
        raise RuntimeError(f"a process that prepares text ended with {self._process.wait()}, in shard {shard.number}")

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not written yet
                assert pipe
                pipe.close()

    def _write(self, what: dict) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
