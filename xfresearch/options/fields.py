"""Fields of a config. Each has a default, a range, one line of documentation, and one thing that it decides.

A config is a frozen dataclass whose fields are made by `option`, `group` and `choice`. A field decides one of

    function         the function that a model computes from its parameters
    initialisation   the initial values of the parameters
    training         how the parameters change
    precision        how numbers are rounded, and so the last digits of all that is computed
    execution        how a run is computed: speed, memory, output files; the result by the order of sums at most
    machine          paths and thread counts of a machine: each process may have a different value

Resume, fingerprints and the comparison of two models use this (comparing.py).
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
CHOOSING = ("kind", "layout")  # fields whose value names the class of their group
Decides = Literal["function", "initialisation", "training", "precision", "execution", "machine"]


def with_values(config: D, values: Mapping[str, Any]) -> D:
    """A copy of a dataclass with these fields: `dataclasses.replace` for names that are known only at run time."""
    return dataclasses.replace(config, **values)


class Needs(NamedTuple):
    """The condition under which an option is used. Setting an option that is not used is an error."""

    words: str  # "position='rope'"
    holds: Callable[[Any], bool]  # of the dataclass that has the option


def where(**values: Any) -> Needs:
    """The option is used if each named field has the given value, or one of a tuple of values."""
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    words = " and ".join(f"{name}={' or '.join(map(repr, each))}" for name, each in allowed.items())
    return Needs(words, lambda config: all(getattr(config, name) in each for name, each in allowed.items()))


def unless(**values: Any) -> Needs:
    """The option is used unless a named field has the given value."""
    words = " and ".join(f"{name} other than {value!r}" for name, value in values.items())
    return Needs(words, lambda config: all(getattr(config, name) != value for name, value in values.items()))


class Choice(NamedTuple):
    """The classes that a group of options can have, by the value of one of its fields."""

    by: str  # 'kind' or 'layout'
    classes: Mapping[str, type]
    default: str

    def make(self, name: str) -> Any:
        """The options of the class `name`, at their defaults."""
        return self.classes[name](**{self.by: name})


def option(
    default: Any,
    doc: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    decides: Decides | None = None,
    needs: Needs | None = None,
) -> Any:
    """A field with a single value. `low` and `high` are inclusive bounds, `above` is an exclusive one. `decides` is by
    default that of the group that has the field."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "decides": decides, "needs": needs}
    return field(default=default, metadata=metadata)


def group(default: Any, doc: str, decides: Decides | None = None, needs: Needs | None = None) -> Any:
    """A field that is a dataclass of options."""
    return field(default=default, metadata={"doc": doc, "decides": decides, "needs": needs})


def choice(classes: Mapping[str, type], default: str, doc: str, by: str = "kind") -> Any:
    """A field that is a group of options. Its class depends on the value of the field `by` inside it."""
    chosen = Choice(by, classes, default)
    return field(default_factory=lambda: chosen.make(default), metadata={"doc": doc, "choice": chosen})


def choices(classes: Mapping[str, type], defaults: dict[str, str], doc: str, by: str) -> Any:
    """A field that is a dictionary of such groups. `defaults` are its initial names and their classes."""
    chosen = Choice(by, classes, next(iter(defaults.values())))
    make = lambda: {name: chosen.make(of) for name, of in defaults.items()}  # noqa: E731
    return field(default_factory=make, metadata={"doc": doc, "choice": chosen})


def named(classes: Mapping[str, type], doc: str) -> Any:
    """A field that is a dictionary of groups, empty at first. `classes` are those that it may have, by name."""
    return field(default_factory=dict, metadata={"doc": doc, "named": classes})


class Leaf(NamedTuple):
    """One option of a config."""

    path: str  # 'blocks.main.attention.heads'
    value: Any
    field: dataclasses.Field[Any]
    owner: Any  # the dataclass that has it
    unread: str  # the condition under which it would be used; '' if it is used
    decides: Decides

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def chooses(self) -> bool:
        """Whether the value names the class of its group."""
        return self.field.name in CHOOSING


def leaves(config: Any, prefix: str = "", unread: str = "", decides: Decides = "function") -> Iterator[Leaf]:
    """Every option of a config, including those of nested groups."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        path = prefix + spec.name
        needs = spec.metadata.get("needs")
        own_decides = spec.metadata.get("decides") or decides
        unmet = unread or ("" if needs is None or needs.holds(config) else needs.words)
        if isinstance(value, dict):
            for name, item in value.items():
                yield from leaves(item, f"{path}.{name}.", unmet, own_decides)
        elif dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}.", unmet, own_decides)
        else:
            yield Leaf(path, value, spec, config, unmet, own_decides)


def changed(config: object, *but: str) -> list[str]:
    """'path=value' of every option that is not its default and decides the function of a model, without those in `but`."""
    return [
        f"{leaf.path}={leaf.value!r}"
        for leaf in leaves(config)
        if leaf.value != leaf.default and leaf.decides == "function" and leaf.path not in but
    ]


def with_defaults(config: Any, deciding: Decides) -> Any:
    """`config` with the defaults of all options that decide `deciding`."""
    changes = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if spec.metadata.get("decides") == deciding:
            changes[spec.name] = spec.default
        elif dataclasses.is_dataclass(value):
            changes[spec.name] = with_defaults(value, deciding)
    return dataclasses.replace(config, **changes)


@cache
def types_of(options: Any) -> dict[str, Any]:
    """{name: type} of the fields of a class."""
    return typing.get_type_hints(options)


def values_of(kind: Any) -> tuple[Any, ...]:
    """The values of a Literal; () for any other type."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


class Described(NamedTuple):
    """An option that a config can have."""

    path: str  # 'model.blocks.main.attention.window'
    default: Any
    doc: str
    values: tuple[Any, ...]  # that are allowed; () for any of its type
    kind: str  # 'kind=moe', the class of its group that has it; '' for the default class
    needs: str  # the condition under which it is used, in words; '' without


def every_option(
    config: Any, prefix: str = "", chosen: Choice | None = None, kind: str = "", needs: str = ""
) -> Iterator[Described]:
    """Every option that a config can have, whatever its kinds and layouts are, and with the groups that may be named.
    `chosen` and `kind` are of the group `config`, `needs` is the condition under which it is used."""
    for spec in dataclasses.fields(config):
        value, path, inner = getattr(config, spec.name), prefix + spec.name, spec.metadata.get("choice")
        condition = spec.metadata.get("needs")
        words = condition.words if condition else needs
        if "named" in spec.metadata:
            for name, cls in spec.metadata["named"].items():
                yield from every_option(cls(), f"{path}.{name}.", needs=words)
        elif inner:
            for group in [f"{path}.{name}." for name in value] if isinstance(value, dict) else [f"{path}."]:
                yield from every_option(inner.make(inner.default), group, inner)
                for name in inner.classes:
                    yield from every_option(inner.make(name), group, inner, f"{inner.by}={name}")
        elif dataclasses.is_dataclass(value):
            yield from every_option(value, f"{path}.", None, kind, words)
        else:
            choosing = chosen is not None and spec.name == chosen.by
            values = tuple(chosen.classes) if chosen and choosing else values_of(types_of(config.__class__)[spec.name])
            if not (choosing and kind):
                yield Described(path, value, spec.metadata["doc"], values, kind, words)
