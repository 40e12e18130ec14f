"""Random damage to bytes and to the values of formats. The same seed makes the same damage."""

import json
import random

from tests.fuzz.formats import FORMATS

ODD = [None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63), 1e308, float("nan"), float("inf"), 0.5, "", "a", "\ud800", "\0"]
ODD += ["NaN", "x" * 10_000, [], [[]], {}, {"a": 1}, [1] * 1000, 10**6, 2**28, "../../etc/passwd", "нет"]


def mutate(content: bytes, seed: str) -> bytes:
    """`content` with one to three pieces of damage: to its values, if it has one of FORMATS, or to its bytes."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        changed = _values(content, draw) if draw.random() < 0.6 else None
        content = _bytes(content, draw) if changed is None else changed
    return content


def _bytes(content: bytes, draw: random.Random) -> bytes:
    data = bytearray(content)
    at = draw.randrange(len(data) + 1)
    end = min(at + draw.choice([1, 4, 8, 64]), len(data))
    how = draw.choice(["truncate", "zero", "flip", "insert", "delete", "repeat", "integer", "nest"])
    if how == "truncate":
        return bytes(data[:at])
    if how == "nest":
        return b"[" * draw.choice([10, 100_000]) + bytes(data)
    pieces = {
        "zero": bytes(end - at),
        "flip": bytes(byte ^ 1 << draw.randrange(8) for byte in data[at:end]),
        "insert": draw.randbytes(draw.choice([1, 8, 1000])) + data[at:end],
        "delete": b"",
        "repeat": bytes(data[at:end]) * 2,
        "integer": draw.choice([0, -1, 2**31 - 1, 2**63 - 1, 2**40]).to_bytes(8, "little", signed=True)[: end - at],
    }
    data[at:end] = pieces[how]
    return bytes(data)


def _values(content: bytes, draw: random.Random) -> bytes | None:
    """`content` with one value replaced, removed or moved; None if it has no known format."""
    for read, write in FORMATS:
        try:
            for _ in range(10):  # until the format can hold the new value
                value = read(content)
                _damage(value, draw)
                if (written := write(value)) is not None:
                    return written
        except (ValueError, RecursionError):
            continue
    return None


def _damage(value, draw: random.Random) -> None:
    parent, key = _place(value, draw)
    how = draw.choice(["replace", "replace", "remove", "copy", "number"])
    if how == "remove":
        del parent[key]
    elif how == "copy":
        other, name = _place(value, draw)
        parent[key] = json.loads(json.dumps(other[name]))
    elif how == "number" and type(parent[key]) in (int, float):
        parent[key] = draw.choice([-parent[key], parent[key] + 1, parent[key] * 2, float(parent[key]), str(parent[key])])
    else:
        parent[key] = draw.choice(ODD)


def _place(value, draw: random.Random):
    """(container, key) of a value inside `value`. Drawn level by level, so that a long list does not hide the rest."""
    while True:
        if not value or not isinstance(value, (dict, list)):
            raise ValueError("no object or array, or an empty one")
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not value[key] or not isinstance(value[key], (dict, list)) or draw.random() < 0.3:
            return value, key
        value = value[key]
