"""Converts nested mappings to typed configs, and back.

It checks names, types and ranges against the dataclasses, so a mistake gives one line instead of a stack trace.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from xfresearch.options.fields import CHOOSING, Choice, leaves, types_of, values_of
from xfresearch.options.other_names import OTHER_NAMES
from xfresearch.runtime.errors import UserError, did_you_mean, nearest, require
from xfresearch.runtime.schema import is_number

T = TypeVar("T")
TYPES = {int: "an integer", float: "a number", bool: "True or False", str: "a string", tuple: "a tuple, such as ('a', 'b')"}


def from_dict(cls: Callable[..., T], data: Any, key: str = "config") -> T:
    """Builds the dataclass `cls` from a mapping. Raises UserError for an unknown key, a wrong type or a value out of
    range."""
    data = dict(data.items())
    fields = {spec.name: spec for spec in dataclasses.fields(cast(Any, cls))}
    for name, value in data.items():
        if name not in fields:
            known = {field: data.get(field) for field in fields}
            raise UserError(
                f"{key}.{name}={_short(value)}: there is no such key{nearest_key(name, (key, known))} "
                f"({_group_name(data, key)} has {', '.join(fields)})"
            )
    types = types_of(cast(Any, cls))
    values = {}
    for name, value in data.items():
        path, chosen = f"{key}.{name}", fields[name].metadata.get("choice")
        values[name] = _choose(chosen, types[name], value, path) if chosen else _convert(types[name], value, path)
        _check_range(fields[name], values[name], path)
    return cls(**values)


def check_read(config: object, key: str) -> None:
    """Raises UserError if an option is set that nothing reads, or to a value that is not allowed: the configs that Python
    code makes have not been read by `from_dict`."""
    for leaf in leaves(config):
        name = f"{key}.{leaf.path}" if key else leaf.path
        if leaf.unread:
            allowed = f"{leaf.default!r}, its default: it is read only with {leaf.unread}"
            require(leaf.value == leaf.default, name, leaf.value, allowed)
        kind = types_of(leaf.owner.__class__)[leaf.field.name]
        if values_of(kind):
            _convert(kind, leaf.value, f"config.{name}")
        _check_range(leaf.field, leaf.value, f"config.{name}")


def nearest_key(name: str, *groups: tuple[str, Any]) -> str:
    """'; did you mean ...?': keys whose path ends in `name`, of the first group that has any; or else the key that another
    codebase calls `name`; or else the key of the first group that is close to it. A group is its own key and its values."""
    if found := ending_in(name, *groups):
        return did_you_mean(found)
    if name.split(".")[-1] in OTHER_NAMES:
        return did_you_mean([OTHER_NAMES[name.split(".")[-1]]])
    return nearest(name.split(".")[0], groups[0][1])


def ending_in(name: str, *groups: tuple[str, Any]) -> list[str]:
    """The keys whose path ends in `name`, of the first group that has any. A group is its own key and its values."""
    for key, group in groups:
        inside = f"{key}.".removeprefix("config.")
        if found := [f"{inside}{path}" for path in _paths(group) if path.endswith(f".{name}")]:
            return found
    return []


def _paths(group: Any) -> Iterator[str]:
    """The dotted keys of a group and of all groups in it."""
    for name, value in group.items():
        yield name
        if hasattr(value, "items"):
            yield from (f"{name}.{path}" for path in _paths(value))


def _group_name(data: dict[str, Any], key: str) -> str:
    """The key of a group, with the kind or layout that decides its keys."""
    by = next((name for name in CHOOSING if name in data), None)
    return f"{key} of {by}={data[by]!r}" if by else key


def _choose(chosen: Choice, hint: Any, value: Any, key: str) -> Any:
    """The options of a group whose class depends on one of them, or a dictionary of such groups."""
    if not hasattr(value, "items"):
        raise UserError(f"{key}={_short(value)} has the wrong type: it must be a group of keys with {chosen.by}")
    if typing.get_origin(hint) is dict:
        return {name: _choose(chosen, None, item, f"{key}.{name}") for name, item in value.items()}
    name = value.get(chosen.by, chosen.default)
    check_choice(chosen, name, key)
    return from_dict(chosen.classes[name], {**value, chosen.by: name}, key)


def check_choice(chosen: Choice, name: object, key: str) -> None:
    """Raises UserError if a kind or layout does not exist."""
    if not isinstance(name, str) or name not in chosen.classes:
        allowed = ", ".join(map(repr, chosen.classes)) + nearest(str(name), chosen.classes)
        raise UserError(f"{key}.{chosen.by}={_short(name)} is not allowed: it must be one of {allowed}")


def _convert(kind: Any, value: Any, key: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union) and types.NoneType in args:
        return None if value is None else _convert(next(a for a in args if a is not types.NoneType), value, key)
    if dataclasses.is_dataclass(kind):
        if not hasattr(value, "items"):
            keys = ", ".join(spec.name for spec in dataclasses.fields(kind))
            raise UserError(f"{key}={_short(value)} has the wrong type: it must be a group of keys: {keys}")
        made: Any = kind
        return from_dict(made, value, key)
    if origin is typing.Literal:
        if value not in args:
            allowed = ", ".join(repr(a) for a in args)
            raise UserError(
                f"{key}={_short(value)} is not allowed: it must be one of {allowed}{nearest(str(value), args)}"
            )
        return value
    if origin is dict and hasattr(value, "items"):
        return {name: _convert(args[1], item, f"{key}.{name}") for name, item in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)):
        return _tuple(args, value, key)
    if kind is float and is_number(value):
        return float(value)
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
        return value
    raise UserError(f"{key}={_short(value)} has the wrong type {type(value).__name__}: it must be {_type_name(kind)}")


def _tuple(kinds: tuple[Any, ...], value: Sequence[Any], key: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise UserError(f"{key}={_short(value)} has the wrong length {len(value)}: it must have {len(kinds)} items")
    return tuple(_convert(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _check_range(spec: dataclasses.Field[Any], value: Any, key: str) -> None:
    if value is None:
        return
    low, high, above = (spec.metadata.get(name) for name in ("low", "high", "above"))
    inside = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    if not inside:
        words = (("at least", low), ("above", above), ("at most", high))
        bounds = " and ".join(f"{word} {n}" for word, n in words if n is not None)
        raise UserError(f"{key}={_short(value)} is not allowed: it must be {bounds}")
    if isinstance(value, int) and abs(value) >= 2**31:
        raise UserError(f"{key}={_short(value)} is not allowed: it must be below 2^31")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value!r} is not allowed: it must be a finite number")


def _short(value: Any) -> str:
    try:
        text = " ".join(str(value).split()) if hasattr(value, "items") else repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is dict:
        return f"a group of names, each {_type_name(typing.get_args(kind)[1])}"
    if typing.get_origin(kind) is tuple:
        return f"a tuple, each item {_type_name(typing.get_args(kind)[0])}"
    return TYPES.get(kind, "a group of keys")


def to_json(config: Any) -> str:
    """A config as JSON, from which `from_dict` builds an equal one."""
    return json.dumps(dataclasses.asdict(config), indent=2)
