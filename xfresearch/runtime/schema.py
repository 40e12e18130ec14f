"""What a JSON file of ours must hold. A file is checked as a whole when it is read, so that no other code meets a list where
it needs a number: `check` raises UserError, in one line with the file, the key, the value and what is allowed.

A schema is `float` (a number that a float can hold), `int`, `str`, `bool`, `dict` or `list` with anything in it; [schema], a
list of such values; {name: schema}, an object that has these keys, and maybe others; {ANY: schema}, an object of such
values; Maybe(schema), a value that may be null or missing; or Of(holds, words), a value of another condition.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from xfresearch.runtime.errors import UserError, shortened

ANY = "*"
_WORDS = {float: "a number", int: "an integer", str: "a string", bool: "true or false", dict: "an object", list: "a list"}


class Maybe(NamedTuple):
    """A value that may be null or missing."""

    schema: Any


class Of(NamedTuple):
    """A value for which `holds`. `words` say what it is."""

    holds: Callable[[Any], bool]
    words: str


def is_number(value) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    return isinstance(value, float) or is_integer(value) and abs(value) <= sys.float_info.max


def is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check(value, schema, file, key: str = ""):
    """Returns `value`, a JSON value of `file`. Raises UserError unless it holds what the schema says."""
    if isinstance(schema, Maybe):
        return value if value is None else check(value, schema.schema, file, key)
    if isinstance(schema, Of):
        _require(schema.holds(value), value, schema.words, file, key)
    elif isinstance(schema, type):
        tests = {float: is_number, int: is_integer}
        _require(tests.get(schema, lambda v: isinstance(v, schema))(value), value, _WORDS[schema], file, key)
    elif isinstance(schema, list):
        _require(isinstance(value, list), value, "a list", file, key)
        for number, item in enumerate(value):
            check(item, schema[0], file, f"{key}[{number}]")
    else:
        _require(isinstance(value, dict), value, "an object", file, key)
        for name in value if ANY in schema else schema:
            one = schema.get(name, schema.get(ANY))
            if name not in value and not isinstance(one, Maybe):
                raise UserError(f"{file}: {_joined(key, name)} is missing")
            check(value.get(name), one, file, _joined(key, name))
    return value


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _require(holds: bool, value, words: str, file, key: str) -> None:
    if not holds:
        subject = f"{key}={shortened(repr(value), 60)}" if key else f"a {type(value).__name__}"
        raise UserError(f"{file}: {shortened(subject, 200)} is not allowed: it must be {words}")
