"""Exact conversions between variants: each is (lm, layers=None, ...) -> (lm, certificate).

    lm2, certificate = surgery.merge_query_key(lm)

A conversion raises Refused where the result would not compute the same function, and names the term in the way.
docs/surgery.md has a table of them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from xfresearch.loading.language_model import LanguageModel
from xfresearch.surgery.certificate import Certificate
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.converting import convert
from xfresearch.surgery.refused import Refused
from xfresearch.surgery.registry import CONVERSIONS, chain

__all__ = [
    "CONVERSIONS",
    "Refused",
    "absorb_value_output",
    "centre",
    "chain",
    "convert",
    "drop_key",
    "drop_output",
    "drop_query",
    "drop_value",
    "expand_groups",
    "factor_query_key",
    "feed_forward_to_memory",
    "fold_norm",
    "fuse_output",
    "memory_to_feed_forward",
    "merge_query_key",
    "pool_groups",
    "sink_to_slot",
    "slot_to_sink",
    "stack",
    "unstack",
    "untie",
    "upcycle",
    "widen",
]


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


def _function(conversion: Conversion) -> Function:
    def apply(
        lm: LanguageModel, layers: Sequence[int] | None = None, stack: str = "", role: str = "", **options: Any
    ) -> tuple[LanguageModel, Certificate]:
        chosen = None if layers is None else tuple(layers)
        return convert(lm, chain(conversion.name, chosen, options, stack, role))

    arguments = "".join(f"\n{name}: {option.doc}" for name, option in conversion.options.items())
    apply.__name__ = conversion.name
    apply.__doc__ = f"{conversion.about}.\n\nExact if: {conversion.conditions}.{arguments}"
    return apply


absorb_value_output = _function(CONVERSIONS["absorb_value_output"])
centre = _function(CONVERSIONS["centre"])
drop_key = _function(CONVERSIONS["drop_key"])
drop_output = _function(CONVERSIONS["drop_output"])
drop_query = _function(CONVERSIONS["drop_query"])
drop_value = _function(CONVERSIONS["drop_value"])
expand_groups = _function(CONVERSIONS["expand_groups"])
factor_query_key = _function(CONVERSIONS["factor_query_key"])
feed_forward_to_memory = _function(CONVERSIONS["feed_forward_to_memory"])
fold_norm = _function(CONVERSIONS["fold_norm"])
fuse_output = _function(CONVERSIONS["fuse_output"])
memory_to_feed_forward = _function(CONVERSIONS["memory_to_feed_forward"])
merge_query_key = _function(CONVERSIONS["merge_query_key"])
pool_groups = _function(CONVERSIONS["pool_groups"])
sink_to_slot = _function(CONVERSIONS["sink_to_slot"])
slot_to_sink = _function(CONVERSIONS["slot_to_sink"])
stack = _function(CONVERSIONS["stack"])
unstack = _function(CONVERSIONS["unstack"])
untie = _function(CONVERSIONS["untie"])
upcycle = _function(CONVERSIONS["upcycle"])
widen = _function(CONVERSIONS["widen"])
