"""Runs a library that parses a stranger's file in a child process with limits of memory and processor time.

Whatever the library does there, a panic, an abort, an endless loop, is one exception here. A program is a module with a
function `answers(request: bytes) -> Iterator[bytes]`, which the child runs (confined_child.py). It imports next to nothing
of this package, so that its process starts in a tenth of a second. The process of a program is kept for its next request.

The limit of memory is that of addresses (RLIMIT_AS), which macOS does not enforce. The limit of time holds everywhere.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from xfresearch.runtime import confined_child
from xfresearch.runtime.confined_child import DATA, END, FRAME, FULL, REFUSED, REQUEST

_WAIT = 10  # times the limit of processor time: how long an answer may take on a machine that is busy
_PIPE = 1 << 20  # bytes; on a busy machine, each change between the two processes waits for its turn
_idle: dict[
    tuple[int, str], list["_Child"]
] = {}  # by the number of this process, which a fork changes, and the program


class Failed(Exception):
    """The program refused its request, or died. Its text is one line."""


class Exceeded(Failed):
    """The program took more than its limits."""


def ask(program: str, request: bytes, seconds: int, memory: int) -> Iterator[bytearray]:
    """The parts of a program's answer to a request. `program` is the name of a module; the child may use `seconds` of
    processor time, and `memory` bytes above those that its libraries take. Raises Failed."""
    kept = _idle.setdefault((os.getpid(), program), [])
    child = kept.pop() if kept else _Child(program)
    if not child.is_alive():
        child.stop()
        child = _Child(program)
    try:
        yield from child.answers(request, seconds, memory)
    finally:
        kept.append(child) if child.is_idle else child.stop()


class _Child:
    """A process of a program. One that has not ended its answer is of no further use."""

    def __init__(self, program: str):
        places = [str(Path(confined_child.__file__).parents[2]), *filter(None, sys.path)]
        command = [sys.executable, "-I", "-S", confined_child.__file__, program, json.dumps(places)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # otherwise each thread reserves addresses
        self._process = subprocess.Popen(
            command, bufsize=0, pipesize=_PIPE, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment
        )
        self.is_idle = True

    def is_alive(self) -> bool:
        """It may have been killed while it had nothing to do."""
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def answers(self, request: bytes, seconds: int, memory: int) -> Iterator[bytearray]:
        self.is_idle = False
        limits = f"{seconds} s of processor time or {memory >> 20:,} MiB of memory"
        try:
            self._write(REQUEST.pack(seconds, memory, len(request)) + request)
            while (frame := self._frame(_WAIT * seconds))[0] == DATA:
                yield frame[1]
        except (BrokenPipeError, EOFError):
            raise _death(self._process.wait(), limits) from None
        except TimeoutError:
            raise Exceeded(f"it takes more than {_WAIT * seconds} s") from None
        kind, content = frame
        self.is_idle = kind in (END, REFUSED)
        if kind == FULL:
            raise Exceeded(f"it takes more than {limits}")
        if kind != END:
            raise Failed((content.decode("utf-8", "replace").splitlines() or ["it cannot be read"])[0])

    def _write(self, content: bytes) -> None:
        assert self._process.stdin
        left = memoryview(content)
        while left:
            left = left[self._process.stdin.write(left) :]

    def _frame(self, seconds: int) -> tuple[bytes, bytearray]:
        kind, size = FRAME.unpack(self._read(FRAME.size, seconds))
        return kind, self._read(size, seconds)

    def _read(self, size: int, seconds: int) -> bytearray:
        """Raises TimeoutError if there is nothing to read for so many seconds, and EOFError if the process has ended."""
        assert self._process.stdout
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        content = bytearray(size)
        left = memoryview(content)
        while left:
            if not waiting.poll(1000 * seconds):
                raise TimeoutError
            count = os.readv(self._process.stdout.fileno(), [left])
            if not count:
                raise EOFError
            left = left[count:]
        return content


def _death(code: int, limits: str) -> Failed:
    """Why a process ended before its answer did, by its exit code."""
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return Exceeded(f"it takes more than {limits}")
    return Failed(f"the library that reads it failed ({signal.Signals(-code).name if code < 0 else code})")


@atexit.register
def _stop_all() -> None:
    for (process, _), kept in _idle.items():
        for child in kept if process == os.getpid() else ():
            child.stop()
