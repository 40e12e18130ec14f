"""Differential attention (Ye et al. 2024): the difference of two softmax maps, which cancels what both attend to.

    A_i = softmax(q_i k_i^T / sqrt(K)), i = 1, 2        o = (A_1 - lambda A_2) v        y = W_O [(1 - lambda_0) norm(o)]

Each head has two queries and two keys of size K and one value of size 2 K. So H heads have as many parameters as 2 H
heads of softmax attention of size K. All heads of a layer share lambda, which has four trained vectors of size K (eq. 1
to 3):

    lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_0        lambda_0 = 0.8 - 0.6 exp(-0.3 l), l = 0 in the first layer

norm is an RMSNorm of each head. As in the authors' code, all heads share its gain of size 2 K.

Parameters: 4 D H K + 4 D G K of the matrices, 4 K of lambda and 2 K of the norm.
FLOPs per token: 2 per weight of the matrices + 2 (2 H) (K + 2 K) L.      Cache per token: 4 G K values.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from xfresearch.kernels.attention import alterations, attention, choose_attention, describe
from xfresearch.kernels.masks import Mask
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.mixers import key_values
from xfresearch.models.mixers.softmax.config import HEAD_OPTIONS, check_rope, heads_in_words, with_sizes
from xfresearch.models.mixers.softmax.options import RopeConfig
from xfresearch.models.mixers.softmax.rope import rotate
from xfresearch.models.norms import HIDDEN, Norm, NormSpec
from xfresearch.models.parameters import parameter, times
from xfresearch.models.place import Place, Rows
from xfresearch.models.sublayer import SublayerConfig, SublayerModule, Traffic
from xfresearch.options.fields import changed, group, option, where
from xfresearch.runtime.errors import require

LAMBDA_STD = 0.1  # of the vectors of lambda, as in the authors' code


@dataclass(frozen=True)
class DifferentialConfig(SublayerConfig):
    kind: str = option("differential", "kind of the mixer")
    heads: int = option(4, "number of heads H, each with two queries", low=1)
    kv_heads: int = option(0, "number of key-value heads G, a divisor of H; 0 for H", low=0)
    head_size: int = option(0, "size K of each of the two queries of a head; 0 for width / (2 heads)", low=0)
    position: Literal["none", "rope"] = option("none", "position information inside attention")
    rope: RopeConfig = group(RopeConfig(), "rotary position embedding", needs=where(position="rope"))
    window: int = option(0, "number of nearest tokens that a token attends to; 0 for all", low=0)
    dropout: float = option(0.0, "dropout rate of attention weights", low=0.0, high=0.99, decides="training")

    @property
    def attends(self) -> bool:
        return True

    @property
    def numbered(self) -> bool:  # lambda_0
        return True

    @property
    def words(self) -> str:
        return ", ".join([heads_in_words(self, "differential heads"), *changed(self, *HEAD_OPTIONS)])

    @property
    def random(self) -> bool:
        return self.dropout > 0

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        return (HIDDEN,)

    @property
    def without_prefix(self) -> str:
        return "window counts past tokens" if self.window else ""

    def resolved(self, place: Place, key: str) -> "DifferentialConfig":
        a = self
        if not a.head_size:
            allowed = f"a divisor of model.width / 2 = {place.width / 2:g}, or set head_size"
            require(place.width % (2 * a.heads) == 0, f"{key}.heads", a.heads, allowed)
            a = replace(a, head_size=place.width // (2 * a.heads))
        a = with_sizes(a, place.width, key)
        if a.position == "rope":
            check_rope(a.rope, a.head_size, f"{key}.rope")
        allowed = "0 with model.causal=False: it counts past tokens"
        require(place.causal or not a.window, f"{key}.window", a.window, allowed)
        return a


class DifferentialAttention(SublayerModule):
    def __init__(self, place: Place, rngs):
        a = place.options
        K = a.head_size
        shapes = _matrices(place)
        self.options = a
        self.dtype = place.dtype
        self.query = Linear(place, shapes["query"], rngs)
        self.key = Linear(place, shapes["key"], rngs)
        self.value = Linear(place, shapes["value"], rngs, scale=place.inner_scale)
        self.output = None if place.bare else Linear(place, shapes["output"], rngs, scale=place.output_scale)
        draws = (LAMBDA_STD * jax.random.normal(rngs.params(), (K,), place.param_dtype) for _ in range(4))
        vectors = [parameter(vector, "K") for vector in draws]
        self.lambda_query_1, self.lambda_key_1, self.lambda_query_2, self.lambda_key_2 = vectors
        self.head_norm = Norm(_norm(place), "K", (2 * K,), place.param_dtype)
        self.mask = _mask(place)

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache with the new keys and values (None without a cache), and no losses."""
        a = self.options
        q_BLHK = ctx.shard(ctx.tap("query", self._rotated("query", self.query(x_BLD, ctx), ctx)), "BLHK")
        k_BLGK = ctx.shard(ctx.tap("key", self._rotated("key", self.key(x_BLD, ctx), ctx)), "BLGK")
        v_BLGV = ctx.shard(ctx.tap("value", self.value(x_BLD, ctx)), "BLGK")
        of_keys = {"k_segments_BS": ctx.segments_BL, "k_prefix_BS": ctx.prefix_BL}
        if cache is not None:
            new = k_BLGK, v_BLGV
            cache = key_values.extended(cache, *new, ctx.cache_index)
            k_BLGK, v_BLGV = key_values.read(cache, *new)
            of_keys = {"k_segments_BS": ctx.cache_segments_BS, "k_prefix_BS": ctx.cache_prefix_BS}
        tapped = ctx.wants("weights")  # only the plain kernel holds the weights of all keys
        maps_BLHV = attention(  # 2 H query heads, 2 G key heads and G value heads
            q_BLHK,
            k_BLGK,
            v_BLGV,
            q_segments_BL=ctx.segments_BL,
            **of_keys,
            q_offset=ctx.cache_index,
            mask=self.mask,
            dropout_rate=a.dropout if ctx.key is not None else 0.0,
            dropout_key=ctx.dropout_key("weights"),
            tap=ctx.tap if tapped else None,
            mesh=ctx.mesh,
            implementation=ctx.execution.attention_kernel if cache is None and not tapped else "plain",
        )
        o_BLHV = ctx.tap("heads", ctx.shard(self._difference(maps_BLHV, ctx), "BLHK"))
        y_BLD = o_BLHV.reshape(*x_BLD.shape[:2], -1) if self.output is None else self.output(o_BLHV, ctx)
        return y_BLD, cache, Aux()

    def _difference(self, maps_BLHV, ctx: Context):
        """(1 - lambda_0) norm(A_1 v - lambda A_2 v). The heads of `maps_BLHV` are ordered by key-value head, then by map,
        so that the heads that share a key are neighbours, and so are those that share a value."""
        B, L = maps_BLHV.shape[:2]
        heads = self.options.heads
        G = self.options.kv_heads
        maps_BLGmRV = maps_BLHV.reshape(B, L, G, 2, heads // G, -1)
        start = lambda_0(ctx.number)
        difference = maps_BLGmRV[:, :, :, 0] - times(maps_BLGmRV[:, :, :, 1], self._lambda(start))
        return times(self.head_norm(difference.reshape(B, L, heads, -1)), 1 - start)

    def _rotated(self, name: str, x_BLHK, ctx: Context):
        """Queries or keys (`name`), rotated by their positions if position is 'rope'."""
        if self.options.position != "rope":
            return x_BLHK
        return rotate(ctx.tap(f"unrotated_{name}", x_BLHK), ctx.positions_BL, self.options.rope)

    def _lambda(self, start):
        """lambda in float32 or wider. `start` is lambda_0."""
        first = (self.lambda_query_1[...] * self.lambda_key_1[...]).sum()
        second = (self.lambda_query_2[...] * self.lambda_key_2[...]).sum()
        return jnp.exp(first) - jnp.exp(second) + start

    def init_cache(self, batch: int, length: int) -> dict:
        G = self.options.kv_heads
        K = self.options.head_size
        return key_values.empty({"key": (2 * G, K), "value": (G, 2 * K)}, batch, length, self.dtype)

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        a = place.options
        K = a.head_size
        total = sum((shape.costs() for shape in _matrices(place).values()), weights(4 * K)) + _norm(place).costs(2 * K)
        cache = 4 * a.kv_heads * K * jnp.dtype(place.dtype).itemsize
        return total + Costs(flops_per_token=12 * a.heads * K * length, cache_bytes_per_token=cache)

    @staticmethod
    def output_width(place: Place) -> int:
        return 2 * place.options.heads * place.options.head_size if place.bare else place.width

    @staticmethod
    def traffic(place: Place) -> Traffic:
        return Traffic(context=4 * place.options.kv_heads * place.options.head_size)

    @staticmethod
    def kernel(place: Place, length: int, rows: Rows, execution, mesh):
        a = place.options

        def shape(*sizes):
            return jax.ShapeDtypeStruct((1, length, *sizes), place.dtype)

        q = shape(2 * a.heads, a.head_size)
        k = shape(2 * a.kv_heads, a.head_size)
        v = shape(a.kv_heads, 2 * a.head_size)
        ids = (shape(), shape()) if rows.segments else None
        altered = alterations(dropout=a.dropout, prefixes=rows.prefixes)
        call = describe(q, k, v, None, ids, 0, _mask(place), altered, mesh)
        return choose_attention(call, execution.attention_kernel)


def lambda_0(layer):
    """The initial value of lambda in a layer. Layers count from 0; the number may be traced."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, jnp.promote_types(jnp.float32, jnp.result_type(float))))


def _mask(place: Place) -> Mask:
    return Mask(place.causal, 0, place.options.window)


def _norm(place: Place) -> NormSpec:
    """The norm of each head: an RMSNorm with a gain, with the epsilon and cast of the block's norm."""
    return NormSpec("rms", gain=True, epsilon=place.norm.epsilon, cast=place.norm.cast)


def _matrices(place: Place) -> dict[str, Shape]:
    a = place.options
    D = place.width
    shapes = {
        "query": Shape("D->HK", D, 2 * a.heads, a.head_size),
        "key": Shape("D->GK", D, 2 * a.kv_heads, a.head_size),
        "value": Shape("D->GK", D, a.kv_heads, 2 * a.head_size),
    }
    return shapes if place.bare else shapes | {"output": Shape("HK->D", a.heads, 2 * a.head_size, D)}
