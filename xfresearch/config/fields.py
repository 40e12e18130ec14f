"""Fields of a config: each has a default, a range, one line of documentation, and says what it decides.

A config is a frozen dataclass whose fields are made by `option`, `group` and `choice`. What a field decides is one of

    function         the function that a model computes from its parameters
    initialisation   the first values of the parameters
    training         how the parameters change
    execution        how all this is computed: speed, memory, what is written; never the result
    machine          where a machine has its files, how many threads it uses: each process may have its own value

Resume, fingerprints and the comparison of two models follow from that (comparing.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal, NamedTuple

from xfresearch.errors import UserError, nearest, require

Decides = Literal["function", "initialisation", "training", "execution", "machine"]


class Needs(NamedTuple):
    """Where an option is read. An option that is set where nothing reads it is an error."""

    words: str  # "position='rope'"
    holds: Callable[[Any], bool]  # of the dataclass that has the option


def where(**values) -> Needs:
    """Read where each named field has the value given, or one of a tuple of values."""
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    words = " and ".join(f"{name}={' or '.join(map(repr, each))}" for name, each in allowed.items())
    return Needs(words, lambda config: all(getattr(config, name) in each for name, each in allowed.items()))


def unless(**values) -> Needs:
    """Read unless a named field has the value given."""
    words = " and ".join(f"{name} other than {value!r}" for name, value in values.items())
    return Needs(words, lambda config: all(getattr(config, name) != value for name, value in values.items()))


class Choice(NamedTuple):
    """Classes of a group of options, by the value of one of its fields."""

    by: str  # 'kind' or 'layout'
    classes: Mapping[str, type]
    default: str

    def make(self, name: str):
        """The options of the class `name`, at their defaults."""
        return self.classes[name](**{self.by: name})


def option(
    default,
    doc: str,
    low=None,
    high=None,
    above=None,
    decides: Decides | None = None,
    needs: Needs | None = None,
):
    """A field with a single value; of numbers, its closed range, or the number that it must be above. It decides what its
    group decides unless it says otherwise."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "decides": decides, "needs": needs}
    return field(default=default, metadata=metadata)


def group(default, doc: str, decides: Decides | None = None, needs: Needs | None = None):
    """A field that is a dataclass of options."""
    return field(default=default, metadata={"doc": doc, "decides": decides, "needs": needs})


def choice(classes: Mapping[str, type], default: str, doc: str, by: str = "kind"):
    """A field that is a group of options whose class depends on the value of its own field `by`."""
    chosen = Choice(by, classes, default)
    return field(default_factory=lambda: chosen.make(default), metadata={"doc": doc, "choice": chosen})


def choices(classes: Mapping[str, type], defaults: dict[str, str], doc: str, by: str):
    """A field that is a dictionary of such groups; `defaults` are the names that it has at first, and their classes."""
    chosen = Choice(by, classes, next(iter(defaults.values())))
    make = lambda: {name: chosen.make(of) for name, of in defaults.items()}  # noqa: E731
    return field(default_factory=make, metadata={"doc": doc, "choice": chosen})


class Leaf(NamedTuple):
    """One option of a config."""

    path: str  # 'blocks.main.attention.heads'
    value: Any
    field: dataclasses.Field
    owner: Any  # the dataclass that has it
    unread: str  # where it would be read, '' where it is read
    decides: Decides

    @property
    def default(self):
        return self.field.default


def leaves(config, prefix: str = "", unread: str = "", decides: Decides = "function") -> Iterator[Leaf]:
    """Every option of a config, also of the groups within it."""
    for spec in dataclasses.fields(config):
        value, path = getattr(config, spec.name), prefix + spec.name
        needs, says = spec.metadata.get("needs"), spec.metadata.get("decides") or decides
        why = unread or ("" if needs is None or needs.holds(config) else needs.words)
        if isinstance(value, dict):
            for name, item in value.items():
                yield from leaves(item, f"{path}.{name}.", why, says)
        elif dataclasses.is_dataclass(value):
            yield from leaves(value, f"{path}.", why, says)
        else:
            yield Leaf(path, value, spec, config, why, says)


def check_read(config, key: str) -> None:
    """UserError for an option that is set where nothing reads it."""
    for leaf in leaves(config):
        if leaf.unread:
            unset = f"{leaf.default!r}, its default: it is read only with {leaf.unread}"
            require(leaf.value == leaf.default, f"{key}.{leaf.path}" if key else leaf.path, leaf.value, unset)


def change(config, path: str, value):
    """`config` with the option at a dotted path set to `value`. Where that chooses a class of options (a kind, a layout),
    options that both classes have keep their values. UserError for an option that there is not."""
    name, _, rest = path.partition(".")
    if name not in config.__dataclass_fields__:
        has = ", ".join(config.__dataclass_fields__)
        raise UserError(f"{path}={value!r}: there is no such option{nearest(name, config.__dataclass_fields__)} (of {has})")
    if not rest:
        return dataclasses.replace(config, **{name: value})
    here, chosen = getattr(config, name), config.__dataclass_fields__[name].metadata.get("choice")
    if chosen and isinstance(here, dict):
        item, _, last = rest.partition(".")
        new = _choose(chosen, here[item], value) if last == chosen.by else change(here[item], last, value) if last else value
        return dataclasses.replace(config, **{name: {**here, item: new}})
    if chosen and rest == chosen.by:
        return dataclasses.replace(config, **{name: _choose(chosen, here, value)})
    return dataclasses.replace(config, **{name: change(here, rest, value)})


def _choose(chosen: Choice, old, name: str):
    """The class `name`, with the values of `old` that are not its defaults, where it has such options."""
    return _carried(old, chosen.make(getattr(old, chosen.by)), chosen.make(name), leave=chosen.by)


def _carried(old, defaults, new, leave: str = ""):
    """`new` with the values of `old` that are not the `defaults`, where it has such options."""
    changes = {}
    for name in {spec.name for spec in dataclasses.fields(new)} & {spec.name for spec in dataclasses.fields(old)} - {leave}:
        value, usual, here = getattr(old, name), getattr(defaults, name), getattr(new, name)
        if dataclasses.is_dataclass(value) and type(value) is not type(here) and type(value) is type(usual):
            changes[name] = _carried(value, usual, here)
        elif value != usual:
            changes[name] = value
    return dataclasses.replace(new, **changes)
