"""A conversion: a map of networks that changes the variant and not the function."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xfresearch.runtime.errors import UserError
from xfresearch.surgery.network import Network, names_of
from xfresearch.surgery.refused import Refused, refuse_unless
from xfresearch.surgery.source_readers import with_encoder


class Option(NamedTuple):
    """An argument of a conversion."""

    default: Any  # its type is that of the value on the command line
    doc: str
    allowed: tuple[Any, ...] = ()  # the allowed values, () for all

    @property
    def values(self) -> str:
        """What is allowed, in words."""
        return " or ".join(map(repr, self.allowed)) if self.allowed else f"of type {type(self.default).__name__}"

    def allows(self, value: object) -> bool:
        """Whether the option may have the value: one of `allowed`, of the type of the default. An int passes for a float."""
        numbers = (int, float) if isinstance(self.default, float) else type(self.default)
        return isinstance(value, numbers) and not isinstance(value, bool) and (not self.allowed or value in self.allowed)


class Where(NamedTuple):
    """Which part of a model a conversion changes; by default all that it applies to."""

    layers: Iterable[int] | None = None  # numbers of layers: of the decoder, if there is an encoder and no `stack`
    stack: str = ""  # of a model with an encoder: 'encoder' or 'decoder'
    role: str = ""  # of the sublayers: 'mixer', 'cross' or 'feed_forward'


EVERYWHERE = Where()
STACKS = ("encoder", "decoder")
MERGE = "merge_adapter"  # the conversion of adapters; no other one knows them


@dataclass(frozen=True)
class Conversion:
    """A conversion between variants.

    convert(network, layers, broken=False, **options) is the converted network of one stack. It raises Refused if the result
    would not compute the same function, except where the conversion is an approximation. `layers` are the numbers of the
    layers to convert, or with `roles` the sublayers of these roles in them. With `broken` it makes the negative control
    instead: the same surgery without one step, whose logits must differ.
    """

    name: str
    about: str  # one line
    conditions: str  # when it is exact
    broken: str  # the step that the control leaves out
    convert: Callable[..., Network]
    # Whether the result may differ, perhaps as a function of the options; the certificate tells by how much.
    approximate: bool | Callable[..., bool] = False
    options: dict[str, Option] = field(default_factory=dict)
    roles: tuple[str, ...] = ()  # of the sublayers that it changes on their own; () if it changes whole layers

    def __call__(
        self,
        network: Network,
        layers: Iterable[int] | None = None,
        broken: bool | str = False,
        stack: str = "",
        role: str = "",
        **options: Any,
    ) -> Network:
        """The network with the parts that `Where` names converted, one stack after the other. broken: True, or the name of
        the stack whose conversion lacks a step. The text of Refused begins with the name of the conversion."""
        options, where = self._all(options), Where(layers, stack, role)
        self._check_adapter(network, where)
        for name in self.stacks(network, where):
            each = network.encoder if name == "encoder" else network
            assert each is not None
            try:
                chosen = self._chosen(each, where)
                new = self.convert(each, chosen, broken=broken in (True, name), **options)
                network = with_encoder(network, new) if name == "encoder" else new
            except Refused as refused:
                stack = "encoder, " if name == "encoder" else ""
                raise Refused(f"{self.name}: {stack}{refused}") from refused
        return network

    def _check_adapter(self, network: Network, where: Where) -> None:
        """Raises Refused for a model with adapters, unless this is the conversion that merges all of them."""
        if self.name == MERGE:
            everywhere = where.layers is None and not where.stack
            refuse_unless(everywhere, f"{MERGE}: all layers of all stacks have adapters: leave out layers and stack")
        else:
            plain = network.model.adapter.kind == "none"
            refuse_unless(plain, f"{self.name}: the model has an adapter: convert {MERGE},{self.name} merges it first")

    def stacks(self, network: Network, where: Where = EVERYWHERE) -> list[str]:
        """The names of the stacks that it changes. Raises UserError if there is none."""
        names = list(STACKS[network.encoder is None :])
        if where.stack not in ("", *names):
            allowed = " or ".join(names)
            raise UserError(f"stack={where.stack!r} is not allowed: this model has the stack {allowed}")
        if where.role and where.role not in self.roles:
            allowed = f"one of {', '.join(self.roles)}" if self.roles else "left out: it changes whole layers"
            raise UserError(f"role={where.role!r} is not allowed with {self.name}: it must be {allowed}")
        if where.stack or where.layers is not None:
            return [where.stack or "decoder"]
        having = [each.stack or "decoder" for each in network.stacks if not where.role or _having(each, where.role)]
        refuse_unless(bool(having), f"{self.name}: no layer has a sublayer of role {where.role!r}")
        return having

    def _chosen(self, network: Network, where: Where) -> Any:
        """The numbers of the layers to convert, each once and in order, or the sublayers in them."""
        layers = _having(network, where.role) if where.role else range(len(network.layers))
        numbers = _checked(layers if where.layers is None else where.layers, len(network.layers))
        return network.targets((where.role,) if where.role else self.roles, numbers) if self.roles else numbers

    def __str__(self) -> str:
        """The name, the options of the command line, what the conversion does, and when it is exact."""
        flags = "".join(f" [--{key.replace('_', '-')}]" for key in self.options)
        return f"{self.name}{flags}\n    {self.about}\n    exact if: {self.conditions}"

    def approximates(self, options: dict[str, Any]) -> bool:
        """Whether the result with these options may differ."""
        return self.approximate(**self._all(options)) if callable(self.approximate) else self.approximate

    def _all(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with defaults for those that are not given. Raises UserError for a value that is not allowed."""
        for name, value in options.items():
            option = self.options.get(name)
            if option and not option.allows(value):
                raise UserError(f"{name}={value!r} is not allowed with {self.name}: it must be {option.values}")
        return {name: option.default for name, option in self.options.items()} | options


def _having(network: Network, role: str) -> list[int]:
    """The numbers of the layers with a sublayer of this role."""
    return [number for number, at in enumerate(network.layers) if names_of(at.block, role)]


def _checked(layers: Iterable[int], count: int) -> tuple[int, ...]:
    """The numbers, each once and in order. Raises UserError for one that a network of `count` layers does not have, and if
    there are none."""
    numbers = tuple(sorted({*layers}))
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong or not numbers:
        raise UserError(f"layers={wrong[0] if wrong else ()} is not allowed: this model has layers 0 to {count - 1}")
    return numbers
