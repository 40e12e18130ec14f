"""Softmax attention with optional memory slots. Each of its four matrices is learned or omitted.

Multi-head attention (Vaswani et al. 2017, eq. 1), with G key-value heads for H query heads (Ainslie et al. 2023), in
four steps:

    project    q_BLHK = x W_Q    k_BSGK = x W_K    v_BSGV = x W_V
    position   Rq, Rk: R is the rotation of RoPE, by each token's position
    attend     o = softmax([cap(scale q Mk^T), cap(scale Rq Rk^T) + bias]) [Mv; v]        scale = 1/sqrt(K)
    output     y = (o * sigmoid(x W_g)) W_O, the gate only with `output_gate` (Qiu et al. 2025, eq. 5)

cap(x) is x, or softcap tanh(x / softcap); biases (logit_bias.py) are not capped. Mk and Mv are the keys and values of M
slots (mixers/memory_slots.py). They have no position, so their logits use the query before its rotation. With an elementwise
memory_activation the slots are not in the softmax, and f(x k^T + b) v is added to y. Shaped attention replaces the
weights A by aI + bA - cC. A sink adds e^b to the denominator of the softmax, with b = 0 (off-by-one softmax) or trained
(gpt-oss, 2025). It is computed as a slot whose key and value are zeros, with b added to its logit. `clip` limits
queries, keys and values, after the norms of queries and keys and before RoPE (OLMo, OLMoE).

Parameters: D H K + D G K + D G V + H V D + M G (K + V), without omitted matrices, and their biases; D H V or D H for
the gate.
FLOPs per token: 2 per weight of the matrices + 2 H (K + V) (L + M).      Cache per token: G (K + V) values.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.kernels.attention import alterations, attention, choose_attention, describe
from xfresearch.kernels.masks import Mask, Shaping
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.mixers import key_values
from xfresearch.models.mixers.memory_slots import HeadSlots, WideSlots, slot_heads, softmax_slots, wide_slots
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.logit_bias import AdaptiveSpan, logit_bias, relative_flops, shared_tables
from xfresearch.models.mixers.softmax.options import (
    AttendOptions,
    MemoryOptions,
    OutputOptions,
    PositionOptions,
    ProjectOptions,
    WeightOptions,
)
from xfresearch.models.mixers.softmax.projections import (
    heads_of,
    linears,
    logit_scale,
    matrices,
    qk_norm_shapes,
    qk_norms,
    sizes_at,
)
from xfresearch.models.mixers.softmax.rope import rotate
from xfresearch.models.parameters import parameter
from xfresearch.models.place import Place, Rows
from xfresearch.models.sublayer import Memory, SublayerModule, Traffic, reads
from xfresearch.runtime.errors import UserError


class Projected(NamedTuple):
    """Queries, keys and values."""

    q_BLHK: jax.Array
    k_BLGK: jax.Array
    v_BLGV: jax.Array
    bare_BLHK: jax.Array | None = None  # the queries before RoPE, if position is 'rope'


class Attention(SublayerModule):
    def __init__(self, place: Place, rngs):
        a = self.options = place.options
        self.sizes = sizes_at(place)
        self.dtype = place.dtype
        self.mask = mask(place)
        self.scale = logit_scale(a, place.width, place.read_width)
        learned = linears(place, matrices(place), rngs)
        self.query, self.key, self.value, self.output = map(learned.get, ("query", "key", "value", "output"))
        norms = qk_norms(place, replace(place.norm, kind=a.qk_norm))
        self.query_norm = norms.get("query")
        self.key_norm = norms.get("key")
        self.memory = self._slots(place, rngs) if a.memory_slots else None
        self.span = AdaptiveSpan(a, place) if a.span == "adaptive" else None
        self.shaping = ShapingGains(a, place.param_dtype) if a.shaping != "none" else None
        self.sink = parameter(jnp.zeros(a.heads, place.param_dtype), "H") if a.sink == "learned" else None
        self.gate = Linear(place, gate_shape(place), rngs) if a.output_gate != "none" else None

    def _slots(self, place: Place, rngs):
        if wide_slots(place.options):
            return WideSlots(place, rngs)
        return HeadSlots(place, self.sizes.qk, self.sizes.v, rngs)

    @reads(ProjectOptions, PositionOptions, WeightOptions, AttendOptions, MemoryOptions, OutputOptions)
    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache with the new keys and values (None without a cache), and the loss of an adaptive span."""
        return self.mixed(self.project(x_BLD, ctx), x_BLD, ctx, cache)

    def mixed(self, projected: Projected, x_BLD, ctx: Context, cache):
        """The steps after `project`."""
        projected = self._tapped(self.position(projected, ctx), ctx)
        o_BLHV, cache = self.attend(projected, ctx, cache)
        y_BLD = self.output_step(ctx.tap("heads", ctx.shard(o_BLHV, "BLHK")), x_BLD, ctx)
        return y_BLD, cache, Aux({} if self.span is None else {"span_loss": self.span.loss(x_BLD, ctx)})

    @reads(ProjectOptions)
    def project(self, x_BLD, ctx: Context) -> Projected:
        """Queries, keys and values, without position."""
        return Projected(self.queries(x_BLD, ctx), *self.keys_and_values(x_BLD, ctx))

    @reads(ProjectOptions)
    def queries(self, x_BLD, ctx: Context):
        return self._normed(heads_of(self.query, x_BLD, self.options.heads, self.sizes.qk, ctx), self.query_norm)

    @reads(ProjectOptions)
    def keys_and_values(self, x_BSD, ctx: Context):
        """Keys k_BSGK and values v_BSGV of the tokens x_BSD that are attended to."""
        sizes = self.sizes
        raw_BSGK = heads_of(self.key, x_BSD, sizes.key_heads, sizes.qk, ctx)
        k_BSGK = self._normed(raw_BSGK, self.key_norm)
        tied = self.options.value == "key"
        v_BSGV = raw_BSGK if tied else heads_of(self.value, x_BSD, sizes.value_heads, sizes.v, ctx)
        return k_BSGK, self._clipped(v_BSGV)

    @reads(PositionOptions)
    def position(self, p: Projected, ctx: Context) -> Projected:
        """Queries and keys, rotated by their positions if position is 'rope'."""
        rope = self.options.rope
        if self.options.position != "rope":
            return p
        bare_BLHK, k_BLGK = ctx.tap("unrotated_query", p.q_BLHK), ctx.tap("unrotated_key", p.k_BLGK)
        q_BLHK, k_BLGK = (rotate(x, ctx.positions_BL, rope) for x in (bare_BLHK, k_BLGK))
        return p._replace(q_BLHK=q_BLHK, k_BLGK=k_BLGK, bare_BLHK=bare_BLHK)

    @reads(PositionOptions, WeightOptions, AttendOptions, MemoryOptions)
    def attend(self, p: Projected, ctx: Context, cache):
        """The outputs of the heads, o_BLHV, and the cache with the new keys and values."""
        a = self.options
        memory = self.slots(p.q_BLHK.dtype) if cache is None else cache.get("memory")
        k_BSGK, v_BSGV = p.k_BLGK, p.v_BLGV
        of_keys = {"k_segments_BS": ctx.segments_BL, "k_prefix_BS": ctx.prefix_BL}
        if cache is not None:
            _require_both(cache, ctx)
            cache = key_values.extended(cache, p.k_BLGK, p.v_BLGV, ctx.cache_index)
            k_BSGK, v_BSGV = key_values.read(cache, p.k_BLGK, p.v_BLGV)
            of_keys = {"k_segments_BS": ctx.cache_segments_BS, "k_prefix_BS": ctx.cache_prefix_BS}
        mask = self._mask(ctx)
        o_BLHV = self.weighed(
            p,
            k_BSGK,
            v_BSGV,
            memory,
            ctx,
            q_segments_BL=ctx.segments_BL,
            **of_keys,
            q_offset=ctx.cache_index,
            mask=mask,
            bias=logit_bias(a, ctx, mask, self.span),
            shaping=None if self.shaping is None else self.shaping(),
            implementation=ctx.execution.attention_kernel if cache is None else "plain",
        )
        return o_BLHV, cache

    @reads(WeightOptions, MemoryOptions)
    def weighed(self, p: Projected, k_BSGK, v_BSGV, memory, ctx: Context, implementation: str, **context):
        """The outputs of the heads, o_BLHV, over all keys and values and the `memory` of slots. `context` are arguments of
        kernels/attention.py."""
        a = self.options
        # Slots of the model's width have the tap of coefficients, and the kernel's memory is then a sink alone.
        of_memory = "sink_weight" if wide_slots(a) else "coefficients"
        # Only the plain kernel holds the weights of all keys and slots.
        tapped = ctx.wants("weights") or memory is not None and ctx.wants(of_memory)
        return attention(
            p.q_BLHK,
            k_BSGK,
            v_BSGV,
            memory=memory,
            memory_q_BLHK=ctx.shard(p.bare_BLHK, "BLHK") if memory and p.bare_BLHK is not None else None,
            scale=self.scale,
            softcap=a.softcap,
            sink_H=None if self.sink is None else self.sink[...],
            dropout_rate=a.dropout if ctx.key is not None else 0.0,
            dropout_key=ctx.dropout_key("weights"),
            tap=(lambda name, x: ctx.tap(of_memory if name == "coefficients" else name, x)) if tapped else None,
            mesh=ctx.mesh,
            implementation="plain" if tapped else implementation,
            **context,
        )

    @reads(MemoryOptions, OutputOptions)
    def output_step(self, o_BLHV, x_BLD, ctx: Context):
        """y_BLD from the outputs of the heads."""
        if self.gate is not None:
            gate_BLHV = ctx.tap("gate", jax.nn.sigmoid(self.gate(x_BLD, ctx)))
            o_BLHV = o_BLHV * (gate_BLHV if gate_BLHV.ndim == 4 else gate_BLHV[..., None])
        y_BLD = o_BLHV.reshape(*o_BLHV.shape[:2], -1) if self.output is None else self.output(o_BLHV, ctx)
        return y_BLD if self.memory is None or not wide_slots(self.options) else y_BLD + self.memory(x_BLD, ctx)

    def _normed(self, x_BLHK, norm):
        return self._clipped(x_BLHK if norm is None else norm(x_BLHK))

    def _clipped(self, x):
        return jnp.clip(x, -self.options.clip, self.options.clip) if self.options.clip else x

    def _tapped(self, p: Projected, ctx: Context) -> Projected:
        """Applies taps, and shards queries, keys and values."""
        q_BLHK, k_BLGK, v_BLGV = (ctx.tap(name, x) for name, x in zip(("query", "key", "value"), p[:3], strict=True))
        return p._replace(
            q_BLHK=ctx.shard(q_BLHK, "BLHK"), k_BLGK=ctx.shard(k_BLGK, "BLGK"), v_BLGV=ctx.shard(v_BLGV, "BLGK")
        )

    def _mask(self, ctx: Context) -> Mask:
        """The mask. Its window may be smaller if trained spans need less."""
        reach = ctx.execution.reach_of(ctx.block)
        return self.mask._replace(window=reach) if reach else self.mask

    def slots(self, dtype):
        """Keys [M, G, K] and values [M, G, V] of the slots in the softmax, with the sink as the last; None without."""
        pairs = [self.memory(dtype)] if self.memory is not None and softmax_slots(self.options) else []
        if self.options.sink != "none":
            heads = slot_heads(self.options) if pairs else self.sizes.key_heads
            pairs.append(tuple(jnp.zeros((1, heads, size), dtype) for size in (self.sizes.qk, self.sizes.v)))
        return tuple(map(jnp.concatenate, zip(*pairs, strict=True))) if pairs else None

    def init_cache(self, batch: int, length: int) -> dict:
        """An empty cache for `length` tokens of each of `batch` sequences, with the keys and values of slots."""
        entries = key_values.empty(cache_shapes(self.options, self.sizes), batch, length, self.dtype)
        memory = self.slots(jnp.dtype(self.dtype))
        return entries | ({"memory": memory} if memory else {})

    def memories(self, dtype) -> dict[str, Memory]:
        if self.memory is None:
            return {}
        wide = wide_slots(self.options)
        return {"": self.memory.memory(dtype) if wide else self.memory.memory(dtype, self.options.heads, self.output)}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        a = place.options
        total = sum(parts_costs(place, length).values(), Costs(flops_per_token=relative_flops(place, length)))
        total += weights(a.heads * ((a.span == "adaptive") + {"none": 0, "skip_init": 2, "shaped": 3}[a.shaping]))
        entries = sum(math.prod(shape) for shape in cache_shapes(a, sizes_at(place)).values())
        return total + Costs(cache_bytes_per_token=entries * jnp.dtype(place.dtype).itemsize)

    @staticmethod
    def output_width(place: Place) -> int:
        a = place.options
        return place.width if a.output == "learned" else a.heads * sizes_at(place).v

    @staticmethod
    def shared_tables(place: Place) -> dict:
        return shared_tables(place)

    @staticmethod
    def longest_input(place: Place) -> int:
        a = place.options
        return place.max_length if a.position == "relative_key" and not a.window else 0

    @staticmethod
    def traffic(place: Place) -> Traffic:
        sizes = sizes_at(place)
        return Traffic(context=sizes.key_heads * sizes.qk + sizes.value_heads * sizes.v)

    @staticmethod
    def kernel(place: Place, length: int, rows: Rows, execution, mesh):
        return choose_attention(training_call(place, length, rows, mesh), execution.attention_kernel)


class ShapingGains(nnx.Module):
    """The trained weights per head of shaped attention: initially 1 for each of I, A and C; in V-SkipInit 1 for I, 0
    for A, and none for C. Parameters: 3 H, or 2 H."""

    def __init__(self, a: SoftmaxConfig, param_dtype: str):
        shaped = a.shaping == "shaped"
        self.identity = parameter(jnp.ones(a.heads, param_dtype), "H")
        self.weights = parameter(jnp.full(a.heads, float(shaped), param_dtype), "H")
        self.uniform = parameter(jnp.ones(a.heads, param_dtype), "H") if shaped else None

    def __call__(self) -> Shaping:
        uniform = jnp.zeros_like(self.identity[...]) if self.uniform is None else self.uniform[...]
        return Shaping(self.identity[...], self.weights[...], uniform)


def mask(place: Place) -> Mask:
    """The attention mask."""
    a = place.options
    return Mask(place.causal, int(not a.sees_itself), a.window)


def gate_shape(place: Place) -> Shape:
    """The shape of W_g."""
    a, width = place.options, place.width
    sizes = (a.heads, sizes_at(place).v)
    return Shape("D->HK", width, *sizes) if a.output_gate == "elementwise" else Shape("D->H", width, a.heads)


def parts_costs(place: Place, keys: int) -> dict[str, Costs]:
    """Costs per token of each matrix, by its name, and of the rest, 'attention', with `keys` tokens to attend to."""
    a, sizes = place.options, sizes_at(place)
    parts = {name: shape.costs(name in a.bias) for name, shape in matrices(place).items()}
    rest = Costs(flops_per_token=2 * a.heads * (sizes.qk + sizes.v) * (keys + (a.sink != "none")))
    for _, dims in qk_norm_shapes(place).values():
        rest += replace(place.norm, kind=a.qk_norm).costs(*dims)
    if a.memory_slots:
        rest += WideSlots.costs(a, place.width) if wide_slots(a) else HeadSlots.costs(a, sizes.qk, sizes.v)
    rest += gate_shape(place).costs() if a.output_gate != "none" else Costs()
    rest += weights(2 * (a.value == "identity_plus") + a.heads * (a.sink == "learned"))
    return parts | {"attention": rest}


def _require_both(cache: dict, ctx: Context) -> None:
    """Raises UserError if a patch replaces a key or a value and the cache stores both as one array."""
    if "value" not in cache and ctx.wants("key", "value"):
        raise UserError("generate cannot replace the key or the value with attention.value='key': the cache has them once")


def cache_shapes(a: SoftmaxConfig, sizes) -> dict[str, tuple[int, int]]:
    """Shapes of the cache entries of a token. With value = 'key', keys and values are one entry if they are equal."""
    once = a.value == "key" and a.position != "rope" and a.qk_norm == "none"
    value = {} if once else {"value": (sizes.value_heads, sizes.v)}
    return {"key": (sizes.key_heads, sizes.qk)} | value


def training_call(place: Place, length: int, rows: Rows, mesh=None):
    """Describes the call of kernels/attention.py in training on sequences of `length` tokens."""
    a = place.options
    sizes = sizes_at(place)

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, place.dtype)

    q = shape(1, length, a.heads, sizes.qk)
    k = shape(1, length, sizes.key_heads, sizes.qk)
    v = shape(1, length, sizes.value_heads, sizes.v)
    count = softmax_slots(a) + (a.sink != "none")
    slots = count, slot_heads(a) if softmax_slots(a) else sizes.key_heads
    memory = (shape(*slots, sizes.qk), shape(*slots, sizes.v)) if count else None
    biases = a.position in ("alibi", "t5", "relative_key") or a.span == "adaptive"
    features = {"shaping": a.shaping != "none", "dropout": a.dropout, "softcap": a.softcap, "prefixes": rows.prefixes}
    altered = alterations(biases=biases, **features)
    ids = shape(1, length)
    documents = (ids, ids) if rows.segments else None
    return describe(q, k, v, memory, documents, 0, mask(place), altered, mesh, sink=a.sink == "learned")
