"""Random damage to bytes and to JSON values. The same seed makes the same damage."""

import json
import random

ODD = [None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63), 1e308, float("nan"), float("inf"), 0.5, "", "a", "\ud800", "\0"]
ODD += ["x" * 10_000, [], [[]], {}, {"a": 1}, [1] * 1000, 10**6, 2**28, "../../etc/passwd", "нет"]


def mutate(content: bytes, seed: str) -> bytes:
    """`content` with one to three pieces of damage: to its JSON values, if it is JSON, or to its bytes."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        changed = _json(content, draw) if draw.random() < 0.6 else None
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


def _json(content: bytes, draw: random.Random) -> bytes | None:
    """`content` with one value replaced, removed or moved; None if it is not a JSON object or array."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    places = list(_places(value))
    if not places:
        return None
    parent, key = draw.choice(places)
    how = draw.choice(["replace", "replace", "remove", "copy", "number"])
    if how == "remove":
        del parent[key]
    elif how == "copy":
        other, name = draw.choice(places)
        parent[key] = json.loads(json.dumps(other[name]))
    elif how == "number" and type(parent[key]) in (int, float):
        parent[key] = draw.choice([-parent[key], parent[key] + 1, parent[key] * 2, float(parent[key]), str(parent[key])])
    else:
        parent[key] = draw.choice(ODD)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _places(value, depth: int = 0):
    """(container, key) of every value inside `value`. Of a long list or object, a part."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items[:50]:
        yield value, key
        if depth < 5:
            yield from _places(item, depth + 1)
