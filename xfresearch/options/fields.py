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

from xfresearch.runtime.errors import UserError, nearest, require

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


def check_read(config: object, key: str) -> None:
    """Raises UserError if an option is set that nothing reads, or to a value that is not in its list of values."""
    for leaf in leaves(config):
        name = f"{key}.{leaf.path}" if key else leaf.path
        if leaf.unread:
            allowed = f"{leaf.default!r}, its default: it is read only with {leaf.unread}"
            require(leaf.value == leaf.default, name, leaf.value, allowed)
        values = _listed(leaf.owner.__class__).get(leaf.field.name)
        if values is not None:  # a change of kind keeps the values of options that both kinds have
            require(leaf.value in values, name, leaf.value, f"one of {', '.join(map(repr, values))}")


@cache
def _listed(options: type) -> dict[str, tuple[Any, ...]]:
    """{name: allowed values} of the fields of a class that have a list of values."""
    hints = typing.get_type_hints(options)
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}


def change(config: Any, path: str, value: Any, prefix: str = "") -> Any:
    """`config` with the option at a dotted path set to `value`. If this option chooses a class of options (a kind, a
    layout), options that both classes have keep their values. Raises UserError if the option does not exist, with the
    path after `prefix`."""
    name, _, rest = path.partition(".")
    fields = config.__dataclass_fields__
    if name not in fields:
        exist = f"{nearest(name, fields)} (the options are {', '.join(fields)})"
        raise UserError(f"{prefix}{path}={value!r}: there is no such option{exist}")
    if not rest:
        return dataclasses.replace(config, **{name: value})
    old = getattr(config, name)
    chosen = fields[name].metadata.get("choice")
    if chosen and isinstance(old, dict):
        item, _, last = rest.partition(".")
        if last == chosen.by:
            new = _choose(chosen, old[item], value)
        else:
            new = change(old[item], last, value, f"{prefix}{name}.{item}.") if last else value
        return dataclasses.replace(config, **{name: {**old, item: new}})
    if isinstance(old, dict):
        item, _, last = rest.partition(".")
        new = change(old[item], last, value, f"{prefix}{name}.{item}.") if last else value
        return dataclasses.replace(config, **{name: {**old, item: new}})
    if chosen and rest == chosen.by:
        return dataclasses.replace(config, **{name: _choose(chosen, old, value)})
    return dataclasses.replace(config, **{name: change(old, rest, value, f"{prefix}{name}.")})


def with_defaults(config: Any, deciding: Decides) -> Any:
    """`config` with the defaults of all options that decide `deciding`."""
    for leaf in leaves(config):
        if leaf.decides == deciding and leaf.value != leaf.default:
            config = change(config, leaf.path, leaf.default)
    return config


def _choose(chosen: Choice, old: Any, name: str) -> Any:
    """Options of the class `name`, with those non-default values of `old` for which it has an option."""
    return _carried(old, chosen.make(getattr(old, chosen.by)), chosen.make(name), leave=chosen.by)


def _carried(old: Any, defaults: Any, new: Any, leave: str = "") -> Any:
    """`new` with those values of `old` that differ from `defaults` and for which `new` has an option."""
    changes = {}
    shared = {spec.name for spec in dataclasses.fields(new)} & {spec.name for spec in dataclasses.fields(old)}
    for name in shared - {leave}:
        value, default, new_value = (getattr(options, name) for options in (old, defaults, new))
        if dataclasses.is_dataclass(value) and type(value) is not type(new_value) and type(value) is type(default):
            changes[name] = _carried(value, default, new_value)
        elif value != default:
            changes[name] = value
    return dataclasses.replace(new, **changes)
