"""Attention to persistent memory slots alone: a layer that acts on each token by itself.

    softmax        q_BLHK = x W_Q    o = softmax(scale q Mk^T) Mv    y = o W_O        slots of the heads' sizes
    elementwise    y = f(x k^T + b) v + c                                             slots of the model's width

The first is the memory of All-attention (Sukhbaatar et al. 2019) without the context; the second is the feed-forward layer,
exactly, with c for bias = ('output',). Both are controls of the question whether the feed-forward layer is a memory.

Parameters: D H K + H V D and their biases, and those of the slots (memory.py). FLOPs per token: 2 per weight of the
matrices, and those of the slots. Cache: none.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from xfresearch.config.fields import option, where
from xfresearch.errors import require
from xfresearch.kernels.plain_attention import mix, scores
from xfresearch.kernels.softcap import softcapped
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.linear import Bias, Linear, Shape
from xfresearch.models.mixers.memory import HeadSlots, WideSlots, wide_slots
from xfresearch.models.mixers.softmax.config import in_order, with_sizes
from xfresearch.models.mixers.softmax.options import MemoryActivation
from xfresearch.models.mixers.softmax.projections import heads_of
from xfresearch.models.parameters import plus
from xfresearch.models.place import Place
from xfresearch.models.sublayer import Memory, SublayerConfig, SublayerModule

BY_HEADS = where(memory_activation="softmax")


@dataclass(frozen=True)
class SlotsConfig(SublayerConfig):
    kind: str = option("slots", "how positions are mixed: not at all")
    memory_slots: int = option(64, "slots M", low=1)
    memory_activation: MemoryActivation = option(
        "softmax", "softmax: slots of the heads' sizes; another: f(x k^T + b) v with slots of the model's width"
    )
    heads: int = option(4, "query heads H", low=1, needs=BY_HEADS)
    kv_heads: int = option(0, "heads G that have keys and values, dividing H; 0 is H", low=0, needs=BY_HEADS)
    head_size: int = option(0, "size K of a head; 0 is width / heads", low=0, needs=BY_HEADS)
    memory_heads: Literal["each", "shared"] = option(
        "each", "slots for each key-value head, or one set for all", needs=BY_HEADS
    )
    query: Literal["learned", "identity", "identity_whole"] = option(
        "learned",
        "queries: a matrix, the input split among the heads, or the whole input for every head",
        needs=BY_HEADS,
    )
    output: Literal["learned", "identity"] = option(
        "learned", "matrix W_O, or the heads side by side", needs=BY_HEADS
    )
    bias: tuple[str, ...] = option((), "projections that have a bias: names among 'query', 'output'")
    scale: float = option(0.0, "factor of the logits; 0 is 1/sqrt(size of a query)", low=0.0, needs=BY_HEADS)
    softcap: float = option(0.0, "c in c tanh(q k / c); 0 is none", low=0.0, needs=BY_HEADS)
    dropout: float = option(
        0.0, "dropout rate of the weights", low=0.0, high=0.99, decides="training", needs=BY_HEADS
    )

    @property
    def random(self) -> bool:
        return self.dropout > 0

    def resolved(self, place: Place, key: str) -> "SlotsConfig":
        if wide_slots(self):
            apart = "'softmax' with a layout whose feed-forward reads the heads"
            require(not place.bare, f"{key}.memory_activation", self.memory_activation, apart)
            return replace(self, bias=in_order(self.bias, ("output",), key))
        a = with_sizes(self, place.width, key)
        a = replace(a, output="identity") if place.bare else a
        whole = a.heads * a.head_size == place.width
        fits = f"one with a matrix unless heads * size = model.width={place.width}, here {a.heads} * {a.head_size}"
        require(a.query != "identity" or whole, f"{key}.query", a.query, fits)
        require(a.output != "identity" or whole or place.bare, f"{key}.output", a.output, fits)
        return replace(a, bias=in_order(a.bias, tuple(_matrices(a, place.width)), key))


def _query_size(a: SlotsConfig, width: int) -> int:
    return width if a.query == "identity_whole" else a.head_size


def _matrices(a: SlotsConfig, width: int) -> dict[str, Shape]:
    """The shape of each learned matrix; none with slots of the model's width."""
    if wide_slots(a):
        return {}
    found = {} if a.query.startswith("identity") else {"query": Shape("D->HK", width, a.heads, a.head_size)}
    return found | ({"output": Shape("HK->D", a.heads, a.head_size, width)} if a.output == "learned" else {})


class SlotAttention(SublayerModule):
    def __init__(self, place: Place, rngs):
        a, D = place.options, place.width
        self.options, self.key_size = a, _query_size(a, D)
        self.scale = a.scale or self.key_size**-0.5 if not wide_slots(a) else 1.0
        scales = {"query": 1.0, "output": place.output_scale}
        learned = {
            name: Linear(place, shape, rngs, bias=name in a.bias, scale=scales[name])
            for name, shape in _matrices(a, D).items()
        }
        alone = Bias("D", (D,), place.param_dtype) if "output" in a.bias and wide_slots(a) else None
        self.query, self.output = learned.get("query"), learned.get("output", alone)
        self.memory = WideSlots(place, rngs) if wide_slots(a) else HeadSlots(place, self.key_size, a.head_size, rngs)

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache as it was, and no losses."""
        return (self._wide if wide_slots(self.options) else self._by_heads)(x_BLD, ctx), cache, Aux()

    def _wide(self, x_BLD, ctx: Context):
        y_BLD = self.memory(x_BLD, ctx)
        return y_BLD if self.output is None else plus(y_BLD, self.output.bias[...])

    def _by_heads(self, x_BLD, ctx: Context):
        a, (key_MGK, value_MGV) = self.options, self.memory(x_BLD.dtype)
        q_BLHK = ctx.shard(ctx.tap("query", heads_of(self.query, x_BLD, a.heads, self.key_size, ctx)), "BLHK")
        logits_BHLM = scores(q_BLHK, key_MGK) * (self.scale * self.key_size**0.5)
        weights_BHLM = jax.nn.softmax(softcapped(logits_BHLM, a.softcap), -1)
        weights_BHLM = ctx.tap("coefficients", ctx.dropout(weights_BHLM, a.dropout, "weights"))
        o_BLHV = mix(weights_BHLM.astype(x_BLD.dtype), value_MGV).astype(x_BLD.dtype)
        o_BLHV = ctx.tap("heads", ctx.shard(o_BLHV, "BLHK"))
        return o_BLHV.reshape(*o_BLHV.shape[:2], -1) if self.output is None else self.output(o_BLHV, ctx)

    def memories(self, dtype) -> dict[str, Memory]:
        return {"": self.memory.memory(dtype)}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        a, D = place.options, place.width
        if wide_slots(a):
            return WideSlots.costs(a, D) + weights(D * ("output" in a.bias))
        total = HeadSlots.costs(a, _query_size(a, D), a.head_size)
        for name, shape in _matrices(a, D).items():
            total += shape.costs(name in a.bias)
        return total

    @staticmethod
    def output_width(place: Place) -> int:
        a = place.options
        return place.width if wide_slots(a) or a.output == "learned" else a.heads * a.head_size
