"""What every kind of sublayer is: a mixer of positions, or a feed-forward layer.

A kind is a class of options and a module. The options derive from `SublayerConfig` and are filled in and checked by
`resolved`; the module derives from `SublayerModule` and is called as fn(x_BLD, ctx, cache) -> (y_BLD, cache, Aux).
Everything else that the rest of the code asks of a sublayer is a method here, with the answer of a kind that has nothing
to say. The tables of kinds are in kinds.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from xfresearch.models.costs import Costs
from xfresearch.models.place import Place


@dataclass(frozen=True)
class SublayerConfig:
    """Options of one kind of sublayer; `kind` is among them."""

    def resolved(self, place: Place, key: str) -> "SublayerConfig":
        """The options with derived sizes filled in. UserError, naming `key`, for options that do not go together, or not
        with the model around them."""
        return self

    @property
    def random(self) -> bool:
        """Whether training draws random numbers in the sublayer."""
        return False

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        """Kinds of the norms inside the sublayer, which have the other options of the block's norm."""
        return ()


class SharedTable(NamedTuple):
    """A trained table that all layers share. Its first values are 0, or drawn from N(0, 1). Blocks that share it agree in
    its shape, but for the number of rows where it `grows`: it then has as many as the largest of them needs."""

    letters: str
    shape: tuple[int, int]
    drawn: bool
    grows: bool


class Traffic(NamedTuple):
    """Numbers per token that are sent between devices, in one direction."""

    routed: int = 0  # to the token's experts, over mesh.expert
    context: int = 0  # keys and values, over mesh.context


class Memory(NamedTuple):
    """keys and values: [F, D] of a feed-forward, [E, F, D] of experts, [M, D] of slots of the model's width, [G, M, K] of
    slots in the softmax (in the space of each head's queries and values; G is 1 where the heads share them).

    multipliers: of gated kinds, what the coefficient f(x . k_i) is multiplied with, as x . u_i; shaped like the keys."""

    keys: jax.Array
    values: jax.Array
    multipliers: jax.Array | None = None


class SublayerModule(nnx.Module):
    """The module of a kind of sublayer, made as cls(place, rngs)."""

    def init_cache(self, batch: int, length: int) -> dict:
        """Room for `length` tokens of each of `batch` sequences; {} without a cache."""
        return {}

    def memories(self, dtype) -> dict[str, Memory]:
        """Keys and values of a single layer's memories, {part: memory}; the part '' is the sublayer itself."""
        return {}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        """Costs in a model that reads `length` tokens."""
        raise NotImplementedError

    @staticmethod
    def output_width(place: Place) -> int:
        """The width of what the sublayer writes."""
        return place.width

    @staticmethod
    def shared_tables(place: Place) -> dict[str, SharedTable]:
        """Tables that all layers share, by name."""
        return {}

    @staticmethod
    def longest_input(place: Place) -> int:
        """The longest sequence that its tables of positions reach; 0 where it has none."""
        return 0

    @staticmethod
    def traffic(place: Place) -> Traffic:
        return Traffic()

    @staticmethod
    def kernel(place: Place, length: int, segments: bool, execution, mesh) -> Any:
        """The kernels.choice.Choice that serves training on sequences of `length` tokens, None where there is only one
        implementation. UserError for one that was asked for and cannot serve."""
        return None

    @staticmethod
    def after_update(params: dict, options: SublayerConfig, statistics: dict) -> dict:
        """The sublayer's stacked parameters after an update; `statistics` are those of the update's forward pass."""
        return params
