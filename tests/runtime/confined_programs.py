"""A program for confined.py that does what its request says, as libraries do with a stranger's file."""

import os
import sys
import time
from collections.abc import Iterator


class Panic(BaseException):
    """What pyo3 raises is not an Exception."""


def answers(request: bytes) -> Iterator[bytes]:
    what, _, value = request.decode().partition(" ")
    if what == "memory":
        yield str(len(bytearray(int(value)))).encode()
    if what == "number":
        yield str(os.getpid()).encode()
    if what == "loop":
        yield b"begun"
        while True:
            pass
    if what == "sleep":
        time.sleep(60)
    if what == "abort":
        os.abort()
    if what == "exit":
        os._exit(3)
    if what == "panic":
        raise Panic("called `Option::unwrap()` on a `None` value")
    if what == "refuse":
        raise ValueError("two\nlines")
    if what == "print":
        os.write(1, b"a library prints")
        print("and Python", flush=True)
        yield from (b"", b"x" * int(value))
    if what == "modules":
        yield " ".join(sys.modules).encode()
