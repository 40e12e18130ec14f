"""Attention to memory slots only: a layer that acts on each token alone.

    softmax        q_BLHK = x W_Q    o = softmax(scale q Mk^T) Mv    y = o W_O        slots of the heads' sizes
    elementwise    y = f(x k^T + b) v + c                                             slots of the model's width

The first is the memory of All-attention (Sukhbaatar et al. 2019) without the context. The second is exactly the
feed-forward layer, with c if bias = ('output',). Both are controls for the question whether the feed-forward layer is a
memory.

Parameters: D H K + H V D and their biases, and those of the slots (memory_slots.py). FLOPs per token: 2 per weight of the
matrices, plus those of the slots. Cache: none.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from xfresearch.kernels.plain_attention import mix, scores
from xfresearch.kernels.slots_attention import slots_attention
from xfresearch.kernels.softcap import softcapped
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.linear import Bias, Linear, Shape
from xfresearch.models.mixers.memory_slots import HeadSlots, WideSlots, slot_values, wide_slots
from xfresearch.models.mixers.softmax.config import in_order, with_sizes
from xfresearch.models.mixers.softmax.options import MemoryActivation
from xfresearch.models.mixers.softmax.projections import heads_of
from xfresearch.models.parameters import plus
from xfresearch.models.place import Place
from xfresearch.models.sublayer import Memory, MemoryPart, SublayerConfig, SublayerModule
from xfresearch.options.fields import changed, option, where
from xfresearch.runtime.errors import require

IN_SOFTMAX = where(memory_activation="softmax")


@dataclass(frozen=True)
class SlotsConfig(SublayerConfig):
    kind: str = option("slots", "kind of mixer (slots do not mix positions)")
    memory_slots: int = option(64, "number of slots M", low=1)
    memory_activation: MemoryActivation = option(
        "softmax", "softmax: slots have the sizes of the heads; others: f(x k^T + b) v with slots of the model's width"
    )
    heads: int = option(4, "number of query heads H", low=1, needs=IN_SOFTMAX)
    kv_heads: int = option(0, "number of key-value heads G, a divisor of H; 0 for H", low=0, needs=IN_SOFTMAX)
    head_size: int = option(0, "size K of a head; 0 for width / heads", low=0, needs=IN_SOFTMAX)
    memory_heads: Literal["each", "shared"] = option(
        "each", "slots for each key-value head, or one set for all", needs=IN_SOFTMAX
    )
    query: Literal["learned", "identity", "identity_whole"] = option(
        "learned",
        "queries: a matrix, the input split among the heads (identity), or the whole input for every head",
        needs=IN_SOFTMAX,
    )
    output: Literal["learned", "identity"] = option(
        "learned", "matrix W_O, or the concatenated heads", needs=IN_SOFTMAX
    )
    bias: tuple[str, ...] = option((), "projections with a bias: names among 'query', 'output'")
    scale: float = option(0.0, "factor of the logits; 0 for 1/sqrt(size of a query)", low=0.0, needs=IN_SOFTMAX)
    softcap: float = option(0.0, "c in c tanh(q k / c); 0 for no softcap", low=0.0, needs=IN_SOFTMAX)
    dropout: float = option(
        0.0, "dropout rate of the weights", low=0.0, high=0.99, decides="training", needs=IN_SOFTMAX
    )

    @property
    def memory_parts(self) -> dict[str, MemoryPart]:
        return {"": slot_values(self)}

    @property
    def slots(self) -> int:
        return self.memory_slots

    @property
    def identities(self) -> dict[str, str]:
        if wide_slots(self):
            return {}
        given = {"query": self.query, "output": self.output}
        return {name: kind for name, kind in given.items() if kind != "learned"}

    @property
    def bias_places(self) -> tuple[str, ...]:
        return ("output", "memory") if wide_slots(self) else ("query", "output")

    def with_biases(self, parts: set[str]) -> "SlotsConfig":
        return replace(self, bias=tuple(name for name in ("query", "output") if name in {*self.bias, *parts}))

    @property
    def words(self) -> str:
        named = ("kind", "memory_slots", "memory_activation", "heads", "head_size", "kv_heads")
        kind = f"with {self.memory_activation}" if wide_slots(self) else f"for {self.heads} heads of {self.head_size}"
        return ", ".join([f"{self.memory_slots} memory slots {kind}, without context", *changed(self, *named)])

    @property
    def random(self) -> bool:
        return self.dropout > 0

    def resolved(self, place: Place, key: str) -> "SlotsConfig":
        if wide_slots(self):
            allowed = "'softmax' with a layout whose feed-forward reads the heads"
            require(not place.bare, f"{key}.memory_activation", self.memory_activation, allowed)
            return replace(self, bias=in_order(self.bias, ("output",), key))
        a = with_sizes(self, place.width, key)
        a = replace(a, output="identity") if place.bare else a
        whole = a.heads * a.head_size == place.width
        allowed = f"'identity' only if heads * size = model.width={place.width}, here {a.heads} * {a.head_size}"
        require(a.query != "identity" or whole, f"{key}.query", a.query, allowed)
        require(a.output != "identity" or whole or place.bare, f"{key}.output", a.output, allowed)
        return replace(a, bias=in_order(a.bias, tuple(_matrices(a, place.width)), key))


def _query_size(a: SlotsConfig, width: int) -> int:
    return width if a.query == "identity_whole" else a.head_size


def _matrices(a: SlotsConfig, width: int) -> dict[str, Shape]:
    """The shape of each learned matrix. There is none with slots of the model's width."""
    if wide_slots(a):
        return {}
    shapes = {} if a.query.startswith("identity") else {"query": Shape("D->HK", width, a.heads, a.head_size)}
    return shapes | ({"output": Shape("HK->D", a.heads, a.head_size, width)} if a.output == "learned" else {})


class SlotAttention(SublayerModule):
    def __init__(self, place: Place, rngs):
        a = place.options
        D = place.width
        self.options = a
        self.key_size = _query_size(a, D)
        self.scale = a.scale or self.key_size**-0.5 if not wide_slots(a) else 1.0
        scales = {"query": 1.0, "output": place.output_scale}
        learned = {
            name: Linear(place, shape, rngs, bias=name in a.bias, scale=scales[name])
            for name, shape in _matrices(a, D).items()
        }
        bias = Bias("D", (D,), place.param_dtype) if "output" in a.bias and wide_slots(a) else None
        self.query = learned.get("query")
        self.output = learned.get("output", bias)
        self.memory: WideSlots | HeadSlots = (
            WideSlots(place, rngs) if wide_slots(a) else HeadSlots(place, self.key_size, a.head_size, rngs)
        )

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the unchanged cache, and no losses."""
        if isinstance(self.memory, HeadSlots):
            return self._softmax(*self.memory(x_BLD.dtype), x_BLD, ctx), cache, Aux()
        y_BLD = self.memory(x_BLD, ctx)
        bias = None if self.output is None else self.output.bias
        return y_BLD if bias is None else plus(y_BLD, bias[...]), cache, Aux()

    def _softmax(self, key_MGK, value_MGV, x_BLD, ctx: Context):
        a = self.options
        q_BLHK = ctx.shard(ctx.tap("query", heads_of(self.query, x_BLD, a.heads, self.key_size, ctx)), "BLHK")
        if ctx.wants("coefficients") or (a.dropout and ctx.key is not None):
            o_BLHV = self._with_coefficients(q_BLHK, key_MGK, value_MGV, ctx)
        else:
            o_BLHV = slots_attention(q_BLHK, key_MGK, value_MGV, self.scale, a.softcap, ctx.mesh)
        o_BLHV = ctx.tap("heads", ctx.shard(o_BLHV, "BLHK"))
        return o_BLHV.reshape(*o_BLHV.shape[:2], -1) if self.output is None else self.output(o_BLHV, ctx)

    def _with_coefficients(self, q_BLHK, key_MGK, value_MGV, ctx: Context):
        """`_softmax` with the weights of all slots in memory, for taps and dropout."""
        logits_BHLM = scores(q_BLHK, key_MGK) * (self.scale * self.key_size**0.5)
        weights_BHLM = jax.nn.softmax(softcapped(logits_BHLM, self.options.softcap), -1)
        weights_BHLM = ctx.tap("coefficients", ctx.dropout(weights_BHLM, self.options.dropout, "weights"))
        return mix(weights_BHLM.astype(q_BLHK.dtype), value_MGV).astype(q_BLHK.dtype)

    def memories(self, dtype) -> dict[str, Memory]:
        if isinstance(self.memory, WideSlots):
            return {"": self.memory.memory(dtype, None if self.output is None else self.output.bias)}
        return {"": self.memory.memory(dtype, self.options.heads, self.output)}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        a = place.options
        D = place.width
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
