"""ConfigDicts in which one key decides which others there are: what config files and overrides change."""

import dataclasses
import typing

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from xfresearch.config.fields import Choice
from xfresearch.config.reading import check_choice


class Group(ConfigDict):
    """A ConfigDict one of whose keys, `chosen.by`, chooses the others. Setting it brings the keys of the new kind or layout,
    at their defaults, and removes those of the old one; keys that both have keep their values."""

    def __init__(self, values: dict, chosen: Choice, key: str, followed: "Group | None" = None):
        """`key` is the path of the group, for errors. Where `followed` is given, keys that are not in `values` refer to the
        keys of that group."""
        super().__init__()
        for name, value in values.items():
            super().__setitem__(name, value)
        own = {"_chosen": chosen, "_key": key, "_followed": followed, "_followers": [], "_name": self[chosen.by]}
        for name, value in own.items():
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
        self._settle()

    def _settle(self) -> None:
        """Has the keys of the class that is chosen now."""
        name = self[self._chosen.by]
        if name == self._name:
            return
        object.__setattr__(self, "_name", name)
        _take_keys(self, to_config_dict(self._chosen.make(name), self._key), self._followed)
        for follower in self._followers:
            follower._settle()


def to_config_dict(value, key: str = "config", chosen: Choice | None = None):
    """A dataclass (or a plain value) as a ConfigDict, every default spelt out."""
    if isinstance(value, dict):
        return ConfigDict({name: to_config_dict(item, f"{key}.{name}", chosen) for name, item in value.items()})
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for spec in dataclasses.fields(value):
        item, path = getattr(value, spec.name), f"{key}.{spec.name}"
        found[spec.name] = _unset(value, spec) if item is None else to_config_dict(item, path, spec.metadata.get("choice"))
    return Group(found, chosen, key) if chosen else ConfigDict(found)


def _take_keys(group: ConfigDict, new: ConfigDict, followed: ConfigDict | None) -> None:
    """Gives `group` the keys of `new`: those that it has keep their values, others follow `followed` where that has them."""
    for key in [key for key in group if key not in new]:
        del group._fields[key]
    for key in new:
        other = followed[key] if followed is not None and key in followed else None
        if key not in group:
            ConfigDict.__setitem__(group, key, new[key] if other is None else following(followed, key))
        elif isinstance(new[key], ConfigDict) and not isinstance(new[key], Group):
            _take_keys(group[key], new[key], other)


def _unset(owner, spec: dataclasses.Field):
    """The value None of an option that may be set to its type later."""
    hint = typing.get_type_hints(type(owner))[spec.name]
    return placeholder(next(kind for kind in typing.get_args(hint) if kind is not type(None)))


def follow(group: ConfigDict, key: str = ""):
    """A group like `group`, every key of which refers to the same key of `group`: setting a key of `group` sets it in both,
    setting a key of the new group sets that one alone."""
    values = {name: following(group, name) for name in group}
    return Group(values, group._chosen, key or group._key, group) if isinstance(group, Group) else ConfigDict(values)


def following(group: ConfigDict, name: str):
    return follow(group[name]) if isinstance(group[name], ConfigDict) else FieldReference(group.get_ref(name))
