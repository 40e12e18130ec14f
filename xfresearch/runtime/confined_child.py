"""What a child process of confined.py runs. It imports little, so that it starts fast: python -I -S FILE PROGRAM PLACES"""

import importlib
import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress

REQUEST = struct.Struct("<QQQ")  # seconds, bytes of memory, bytes of the request, which follows
FRAME = struct.Struct("<cQ")  # kind, bytes of the content, which follows
DATA, END = b"d", b"e"
REFUSED, FAILED, FULL = b"r", b"f", b"m"  # after the last two the process is of no further use


def main(program: str, places: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path += json.loads(places)
    requests, answer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    answers = importlib.import_module(program).answers
    used = _addresses()
    while header := requests.read(REQUEST.size):
        seconds, memory, size = REQUEST.unpack(header)
        _limit(seconds, used + size + memory)
        for kind, content in _frames(answers, requests.read(size)):
            answer.write(FRAME.pack(kind, len(content)))
            answer.write(content)
            answer.flush()


def _frames(answers, request: bytes):
    try:
        for content in answers(request):
            yield DATA, content
        yield END, b""
    except MemoryError:
        yield FULL, b""
    except BaseException as error:  # a panic is none of Exception
        kind = REFUSED if isinstance(error, Exception) else FAILED
        yield kind, (str(error).strip() or type(error).__name__).encode("utf-8", "replace")


def _limit(seconds: int, addresses: int) -> None:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    until = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    for limit, most in ((resource.RLIMIT_CPU, until), (resource.RLIMIT_AS, addresses)):
        _, hard = resource.getrlimit(limit)
        with suppress(OSError, ValueError):  # macOS refuses some
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _addresses() -> int:
    """Bytes of the address space that are in use; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
