"""A conversion: a map of networks that changes the variant and not the function."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xfresearch.runtime.errors import UserError
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import Refused


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


@dataclass(frozen=True)
class Conversion:
    """A conversion between variants.

    convert(network, layers, broken=False, **options) is the converted network. It raises Refused if the result would not
    compute the same function, except where the conversion is an approximation. `layers` are the numbers of the layers to
    convert. With `broken` it makes the negative control instead: the same surgery without one step, whose logits must
    differ.
    """

    name: str
    about: str  # one line
    conditions: str  # when it is exact
    broken: str  # the step that the control leaves out
    convert: Callable[..., Network]
    # Whether the result may differ, perhaps as a function of the options; the certificate tells by how much.
    approximate: bool | Callable[..., bool] = False
    options: dict[str, Option] = field(default_factory=dict)

    def __call__(
        self, network: Network, layers: Sequence[int] | None = None, broken: bool = False, **options: Any
    ) -> Network:
        """The network with `layers` (default: all) converted. Refused names the conversion."""
        chosen = _chosen(layers, len(network.layers))
        try:
            return self.convert(network, chosen, broken=broken, **self._all(options))
        except Refused as refused:
            raise Refused(f"{self.name}: {refused}") from refused

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


def _chosen(layers: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """The numbers of the layers to convert, each once and in order. Raises UserError for one that the network, which has
    `count` layers, does not have, and if there are none."""
    numbers = tuple(range(count) if layers is None else sorted({*layers}))
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong or not numbers:
        raise UserError(f"layers={wrong[0] if wrong else ()} is not allowed: this model has layers 0 to {count - 1}")
    return numbers
