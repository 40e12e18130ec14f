"""The table of conversions, and chains of them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, get_args

from xfresearch.loading.language_model import LanguageModel
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.surgery.certificate import Certificate
from xfresearch.surgery.conversion import Conversion, Option, Where
from xfresearch.surgery.converting import Step, convert
from xfresearch.surgery.network import Network

CONVERSIONS: dict[str, Conversion] = {}  # all are in it once xfresearch.surgery has been imported


class Function(Protocol):
    """A conversion as a function. `layers` are numbers of layers, by default all; `options` are the conversion's own.

    With an encoder, `stack` is 'encoder' or 'decoder', by default both; `layers` without `stack` are layers of the decoder.
    `role` chooses sublayers by what they do ('mixer', 'cross' or 'feed_forward', by default all), in conversions that change
    single sublayers.
    """

    __name__: str

    def __call__(
        self, lm: LanguageModel, layers: Sequence[int] | None = None, stack: str = "", role: str = "", **options: Any
    ) -> tuple[LanguageModel, Certificate]: ...


def conversion(
    about: str,
    conditions: str,
    broken: str,
    roles: tuple[str, ...] = (),
    approximate: bool | Callable[..., bool] = False,
    options: Mapping[str, str] = {},
    name: str = "",
) -> Callable[[Callable[..., Network]], Function]:
    """A decorator that puts a function of networks into the table by its `name`, and makes the function of language models.

    options: {argument: what it means}; its default and its allowed values (a Literal) are those of the signature. The others
    are fields of Conversion."""

    def decorate(function: Callable[..., Network]) -> Function:
        own = name or function.__name__
        parameters = inspect.signature(function).parameters
        declared = {
            key: Option(parameters[key].default, words, get_args(parameters[key].annotation))
            for key, words in options.items()
        }
        CONVERSIONS[own] = Conversion(own, about, conditions, broken, function, approximate, declared, roles)

        def apply(
            lm: LanguageModel, layers: Sequence[int] | None = None, stack: str = "", role: str = "", **options: Any
        ) -> tuple[LanguageModel, Certificate]:
            return convert(lm, chain(own, None if layers is None else tuple(layers), options, stack, role))

        arguments = "".join(f"\n{key}: {words}" for key, words in options.items())
        apply.__name__, apply.__doc__ = own, f"{about}.\n\nExact if: {conditions}.{arguments}"
        return apply

    return decorate


def chain(
    names: str,
    layers: tuple[int, ...] | None = None,
    options: dict[str, Any] | None = None,
    stack: str = "",
    role: str = "",
) -> list[Step]:
    """The steps of 'fold_norm,centre', in these layers, of this stack and role. Each takes those of the `options` that it
    has. Raises UserError for a name that is no conversion, and for an option that none of them has."""
    steps = []
    left = dict(options or {})
    for name in names.split(","):
        if name not in CONVERSIONS:
            raise UserError(f"{name} is not a conversion{nearest(name, CONVERSIONS)} (convert --list shows them)")
        conversion = CONVERSIONS[name]
        own = {key: value for key, value in (options or {}).items() if key in conversion.options}
        left = {key: value for key, value in left.items() if key not in own}
        steps.append(Step(conversion, Where(layers, stack, role), own))
    for key in left:
        raise UserError(f"{key}={left[key]!r} is not allowed: {names} has no such option")
    return steps
