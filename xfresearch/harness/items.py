"""What a model has answered, kept on disk: an evaluation that was killed goes on where it stopped.

A line for each item, a JSON list of key and answer, appended as soon as it is known. What a killed process left of a line is
passed over when the file is read, and what is written next starts a line of its own.
"""

import json
from pathlib import Path

from xfresearch.errors import UserError


class Items(dict):
    """{key: answer}; `add` also writes them. Without a path nothing is read or written."""

    def __init__(self, path: Path | None = None):
        super().__init__()
        self.path, lines = path, []
        if path is not None and path.exists():
            *lines, torn = path.read_bytes().split(b"\n")
            if torn:
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
    except (ValueError, TypeError):  # TypeError: JSON, but no pair
        return None


def _append(path: Path, lines: bytes) -> None:
    """One write, so that two processes that add to a file leave whole lines."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write(lines)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
