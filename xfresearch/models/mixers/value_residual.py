"""Softmax attention whose values are mixed with those of the first layer (Zhou et al. 2024, arXiv 2410.17897).

    v = a x W_V + b v_1        a, b trained, initially 1/2 each

v_1 are the values x W_V of the first layer with this kind of mixer: they travel with the residual stream. The cache holds
v. Layers that share values need equal numbers and sizes of key-value heads.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp

from xfresearch.models.context import Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.mixers.softmax.attention import Attention
from xfresearch.models.mixers.softmax.config import HEAD_OPTIONS, SoftmaxConfig, heads_in_words
from xfresearch.models.mixers.softmax.options import RopeConfig
from xfresearch.models.mixers.softmax.projections import head_sizes
from xfresearch.models.parameters import parameter, times
from xfresearch.models.place import Place, Rows
from xfresearch.models.stream import Carried
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.options.fields import changed, group, option, where


@dataclass(frozen=True)
class ValueResidualConfig(SublayerConfig):
    kind: str = option("value_residual", "kind of the mixer")
    heads: int = option(4, "number of query heads H", low=1)
    kv_heads: int = option(0, "number of key-value heads G, a divisor of H; 0 for H", low=0)
    head_size: int = option(0, "size K of a head; 0 for width / heads", low=0)
    position: Literal["none", "rope"] = option("none", "position information inside attention")
    rope: RopeConfig = group(RopeConfig(), "rotary position embedding", needs=where(position="rope"))

    @property
    def attends(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return ", ".join([heads_in_words(self, "heads with a value residual"), *changed(self, *HEAD_OPTIONS)])

    def softmax(self, place: Place, key: str = "") -> SoftmaxConfig:
        """The options of the attention that reads the mixed values."""
        names = ("heads", "kv_heads", "head_size", "position", "rope")
        return SoftmaxConfig(**{name: getattr(self, name) for name in names}).resolved(place, key)

    def resolved(self, place: Place, key: str) -> "ValueResidualConfig":
        a = self.softmax(place, key)
        return replace(self, kv_heads=a.kv_heads, head_size=a.head_size)


def as_softmax(place: Place) -> Place:
    return replace(place, options=place.options.softmax(place))


class ValueResidualAttention(Attention):
    def __init__(self, place: Place, rngs):
        super().__init__(as_softmax(place), rngs)
        self.own, self.first = (parameter(jnp.full((), 0.5, place.param_dtype), "") for _ in range(2))

    def __call__(self, x_BLD, ctx: Context, cache=None):
        projected = self.project(x_BLD, ctx)
        v_BLGV, written_BL = projected.v_BLGV, ctx.carried["first_value_written"]
        first_BLGV = jnp.where(written_BL[..., None, None] > 0, ctx.carried["first_value"], v_BLGV)
        mixed_BLGV = times(v_BLGV, self.own[...]) + times(first_BLGV, self.first[...])
        y_BLD, cache, aux = self.mixed(projected._replace(v_BLGV=mixed_BLGV), x_BLD, ctx, cache)
        carried = {"first_value": first_BLGV, "first_value_written": jnp.ones_like(written_BL)}
        return y_BLD, cache, aux._replace(carried=carried)

    @staticmethod
    def carried(place: Place) -> dict[str, Carried]:
        sizes = head_sizes(place.options.softmax(place), place.width)
        return {
            "first_value": Carried("BLGK", (sizes.value_heads, sizes.v), "zeros"),
            "first_value_written": Carried("BL", (), "zeros"),
        }

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        return Attention.costs(as_softmax(place), length) + weights(2)

    @staticmethod
    def output_width(place: Place) -> int:
        return Attention.output_width(as_softmax(place))

    @staticmethod
    def shared_tables(place: Place) -> dict:
        return {}

    @staticmethod
    def longest_input(place: Place) -> int:
        return 0

    @staticmethod
    def traffic(place: Place):
        return Attention.traffic(as_softmax(place))

    @staticmethod
    def kernel(place: Place, length: int, rows: Rows, execution, mesh):
        return Attention.kernel(as_softmax(place), length, rows, execution, mesh)
