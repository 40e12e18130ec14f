"""A model's answers, saved on disk so that a killed evaluation resumes where it stopped.

The file has one line per item, a JSON list [key, answer], appended as soon as the answer is known. A killed process may
leave an incomplete last line: reading skips it, and the next write starts a new line.
"""

import json
from pathlib import Path

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import append, make_directory, read_bytes

LARGEST = 1 << 32  # bytes of the answers of one model


class Items(dict):
    """{key: answer}. `add` also writes answers to the file. Without a path, nothing is read or written."""

    def __init__(self, path: Path | None = None):
        super().__init__()
        self.path = path
        lines = []
        if path is not None and path.exists():
            *lines, incomplete = read_bytes(path, LARGEST).split(b"\n")
            if incomplete:
                _append(path, b"\n")
        self.update(filter(None, map(_read, lines)))

    def add(self, answers: dict) -> None:
        self.update(answers)
        if self.path is not None and answers:
            _append(self.path, b"".join(json.dumps(pair).encode() + b"\n" for pair in answers.items()))


def _read(line: bytes) -> tuple | None:
    try:
        key, answer = json.loads(line)
        return key, answer
    except (ValueError, TypeError, RecursionError):  # TypeError: the line is JSON, but not a pair
        return None


def _append(path: Path, lines: bytes) -> None:
    """Appends in a single write, so that lines stay whole if two processes append to the same file."""
    try:
        make_directory(path.parent)
        append(path, lines)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
