"""ConfigDicts in which one key decides which other keys exist. Config files and overrides change these."""

import ast
import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from xfresearch.options.fields import Choice, types_of
from xfresearch.options.overrides import find
from xfresearch.options.reading import TYPES, check_choice
from xfresearch.runtime.errors import UserError


class Options(ConfigDict):
    """A ConfigDict whose error for a value of another type is one line."""

    def __setitem__(self, key, value):
        """As in a command, a number for a text is its text: `source_field = 1` names a column. Raises UserError for a value
        of another type than the option has."""
        if type(value) is int and isinstance(self.get(key), str):
            value = str(value)
        try:
            super().__setitem__(key, value)
        except TypeError:
            current = self.get(key)
            wanted = "a group of keys" if isinstance(current, ConfigDict) else type(current).__name__
            raise UserError(f"{key}={value!r} has the wrong type {type(value).__name__}: it must be {wanted}") from None


class Group(Options):
    """A ConfigDict in which the key `chosen.by` chooses the other keys. Setting it adds the keys of the new kind or
    layout with their defaults, and removes the keys of the old one. Keys that both have keep their values."""

    def __init__(self, values: dict, chosen: Choice, key: str, followed: "Group | None" = None):
        """`key` is the path of the group, for errors. If `followed` is given, keys that are added later refer to the
        keys of that group."""
        super().__init__()
        for name, value in values.items():
            super().__setitem__(name, value)
        # ConfigDict treats attributes as keys, so these are set through `object`.
        attributes = {"_chosen": chosen, "_key": key, "_followed": followed, "_followers": [], "_name": self[chosen.by]}
        for name, value in attributes.items():
            object.__setattr__(self, name, value)
        if followed is not None:
            followed._followers.append(self)

    @property
    def by(self) -> str:
        """The key that chooses the others."""
        return self._chosen.by

    def __setitem__(self, key, value):
        if key == self._chosen.by and not isinstance(value, FieldReference):
            check_choice(self._chosen, value, self._key)
        super().__setitem__(key, value)
        self._update_keys()

    def _update_keys(self) -> None:
        """Replaces the keys if another class has been chosen."""
        name = self[self._chosen.by]
        if name == self._name:
            return
        old, new = (to_config_dict(self._chosen.make(each), self._key) for each in (self._name, name))
        object.__setattr__(self, "_name", name)
        _replace_keys(self, old, new, self._followed)
        for follower in self._followers:
            follower._update_keys()


def to_config_dict(value, key: str = "config", chosen: Choice | None = None):
    """A dataclass as a ConfigDict with all of its defaults; other values as they are."""
    if isinstance(value, dict):
        return Options({name: to_config_dict(item, f"{key}.{name}", chosen) for name, item in value.items()})
    if not dataclasses.is_dataclass(value):
        return value
    keys = {}
    for spec in dataclasses.fields(value):
        item = getattr(value, spec.name)
        inner = spec.metadata.get("choice")
        keys[spec.name] = _unset(value, spec) if item is None else to_config_dict(item, f"{key}.{spec.name}", inner)
    return Group(keys, chosen, key) if chosen else Options(keys)


def _replace_keys(group: ConfigDict, old: ConfigDict, new: ConfigDict, followed: ConfigDict | None) -> None:
    """Replaces the keys of `group`, which are those of `old`, by those of `new`. A key that both have keeps its value
    unless it is the default of `old`. Added keys refer to `followed` if it has them."""
    for key in [key for key in group if key not in new]:
        del group._fields[key]
    for key in new:
        known = followed is not None and key in followed
        if key not in group:
            ConfigDict.__setitem__(group, key, following(followed, key) if known else new[key])
        elif isinstance(new[key], ConfigDict):
            if not isinstance(new[key], Group):
                _replace_keys(group[key], old[key], new[key], followed[key] if followed and known else None)
        elif key in old and group[key] == old[key] and old[key] != new[key] and not known:
            ConfigDict.__setitem__(group, key, new[key])


def _unset(owner, spec: dataclasses.Field):
    """A placeholder for an option whose default is None: it can be set to a value of its type later."""
    kinds = typing.get_args(types_of(owner.__class__)[spec.name])
    return placeholder(next(kind for kind in kinds if kind is not type(None)))


def follow(group: ConfigDict, key: str = ""):
    """A new group whose keys refer to the same keys of `group`: setting a key of `group` sets it in both, setting a key
    of the new group sets it only there."""
    values = {name: following(group, name) for name in group}
    return Group(values, group._chosen, key or group._key, group) if isinstance(group, Group) else Options(values)


def following(group: ConfigDict, name: str):
    """A reference to one key of `group`."""
    return follow(group[name]) if isinstance(group[name], ConfigDict) else FieldReference(group.get_ref(name))


def override(config: ConfigDict, overrides: list[tuple[str, str]]) -> None:
    """Sets dotted keys of a config to the values in texts. Of two values of one key, the second one counts. Kinds and
    layouts decide which keys exist, so they are set first, in their order. Raises UserError for a key that does not exist
    and for a value of another type."""
    texts = dict(overrides)
    for name in list(texts):
        group, key = _owner(config, name)
        if isinstance(group, Group) and key == group.by:
            group[key] = texts.pop(name)
    for name, text in texts.items():
        current = find(config, name, text)
        group, key = _owner(config, name)
        if isinstance(current, ConfigDict):
            allowed = f"a value and not a group of keys ({', '.join(current)})"
            raise UserError(f"config.{name}={text} has the wrong type: it must be {allowed}")
        group[key] = _value(group.get_type(key), text, name)


def _owner(config: ConfigDict, name: str) -> tuple[Any, str]:
    """The group with the dotted key, and its last part; None if there is no group."""
    *parts, last = name.split(".")
    group: Any = config
    for part in parts:
        group = group.get(part) if isinstance(group, ConfigDict) else None
    return group, last


def _value(kind: type, text: str, name: str) -> Any:
    """The value of this type that an override has in its text."""
    if kind is str:
        return text
    if text == "None":  # whether the option may be unset shows when the config is read
        return None
    try:
        return READ[kind](text)
    except (LookupError, ValueError):
        raise UserError(f"config.{name}={text} has the wrong type: it must be {TYPES[kind]}") from None


def _tuple(text: str) -> tuple:
    """('a', 'b') as Python writes it, or the only value of a tuple, which needs no quotes."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        if text.strip()[:1] in ("(", "[", "'", '"'):
            raise ValueError(text) from None
        value = text
    return tuple(value) if isinstance(value, tuple | list) else (value,)


BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
READ: dict[type, Callable[[str], Any]] = {bool: lambda text: BOOLEANS[text.lower()], int: int, float: float, tuple: _tuple}
