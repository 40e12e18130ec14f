"""Softmax attention, each of whose four matrices is learned or left out, with optional persistent memory slots.

Multi-head attention (Vaswani et al. 2017, eq. 1), with G key-value heads for H query heads (Ainslie et al. 2023):

    q_BLHK = x W_Q    k_BSGK = x W_K    v_BSGV = x W_V
    o = softmax([cap(scale q Mk^T), cap(scale Rq Rk^T) + bias]) [Mv; v]      y = o W_O        scale = 1/sqrt(K)

R is the rotation of RoPE, by each token's position. Memory slots have no position, so they meet the query without it.

cap(x) is x, or softcap tanh(x / softcap); biases (models/logit_bias.py) are not capped.

Without a matrix (`models/sizes.py` has the sizes): `identity` gives head h the h-th slice of x, `identity_whole` gives
every head all of x; value = 'key' is v = x W_K, value = 'identity_plus' v = x (a I + b W). query = 'merged' is one trained
matrix per head in place of the pair, logits x_l W_h x_s^T / sqrt(head_size), W_h of size D x D, or A_h B_h^T with A_h and
B_h of size D x rank.

`clip` bounds queries, keys and values, after the norms of queries and keys and before RoPE (OLMo, OLMoE).

Mk and Mv are M persistent keys and values without position (models/slots.py); under an elementwise memory_activation they
are not in the softmax, and y has f(x k^T + b) v added to it. Shaped attention has aI + bA - cC in place
of the weights A.

Parameters: D H K + D G K + D G V + H V D + M G (K + V), less those of what is left out, and their biases.
FLOPs per token: 2 per weight of the matrices + 2 H (K + V) (L + M).      Cache per token: G (K + V) values.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels.attention import Sight, attention
from xfresearch.models import costs as c
from xfresearch.models.context import Aux, Context
from xfresearch.models.layouts import inner_scale, output_scale
from xfresearch.models.linear import IdentityPlus, Linear, kernel_std
from xfresearch.models.logit_bias import AdaptiveSpan, logit_bias, relative_flops
from xfresearch.models.norms import Norm
from xfresearch.models.positions import rotate
from xfresearch.models.sizes import (
    cache_shapes,
    head_sizes,
    logit_scale,
    matrices,
    qk_norm_shapes,
    softmax_slots,
    wide_slots,
)
from xfresearch.models.slots import ShapingGains, make_memory, memory_costs


class Attention(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        a, D, sizes = block.attention, model.width, head_sizes(block.attention, model.width)
        self.config, self.dtype, self.sizes = a, model.dtype, sizes
        self.sight = Sight(model.causal, int(not a.sees_itself), a.trimmed or a.window)
        self.scale = logit_scale(a, D)
        kinds = {"value": IdentityPlus if a.value == "identity_plus" else Linear}
        linears = {name: kinds.get(name, Linear)(model, *matrix, rngs, scale=init_scale(model, block, name))
                   for name, matrix in matrices(block, D).items()}  # fmt: skip
        self.query, self.key, self.value, self.output = map(linears.get, ("query", "key", "value", "output"))
        norms = {name: Norm(model, a.qk_norm, block, shape) for name, shape in qk_norm_shapes(a, D).items()}
        self.query_norm, self.key_norm = norms.get("query"), norms.get("key")
        self.memory = make_memory(model, block, rngs) if a.memory_slots else None
        self.span = AdaptiveSpan(model, a) if a.span == "adaptive" else None
        self.shaping = ShapingGains(model, block) if a.shaping != "none" else None

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache with this call's keys and values in it (None without one), and an adaptive span's loss."""
        a = self.config
        bare_BLHK = self._bare(heads_of(self.query, x_BLD, a.heads, self.sizes.qk, ctx), self.query_norm)
        raw_BLGK = heads_of(self.key, x_BLD, self.sizes.key_heads, self.sizes.qk, ctx)
        q_BLHK, k_BLGK = self._rotated(bare_BLHK, ctx), self._rotated(self._bare(raw_BLGK, self.key_norm), ctx)
        tied = a.value == "key"
        v_BLGV = raw_BLGK if tied else heads_of(self.value, x_BLD, self.sizes.value_heads, self.sizes.v, ctx)
        v_BLGV = self._clip(v_BLGV)
        q_BLHK, k_BLGK, v_BLGV = ctx.tap("query", q_BLHK), ctx.tap("key", k_BLGK), ctx.tap("value", v_BLGV)
        q_BLHK, k_BLGK, v_BLGV = ctx.shard(q_BLHK, "BLHK"), ctx.shard(k_BLGK, "BLGK"), ctx.shard(v_BLGV, "BLGK")
        k_segments, memory = ctx.segments_BL, self.slots(x_BLD.dtype) if cache is None else cache.get("memory")
        if cache is not None:
            cache, k_segments = _extend(cache, k_BLGK, v_BLGV, ctx.cache_index), ctx.cache_segments_BS
            k_BLGK, v_BLGV = cache["key"], cache.get("value", cache["key"])
        o_BLHV = attention(
            q_BLHK,
            k_BLGK,
            v_BLGV,
            memory=memory,
            memory_q_BLHK=ctx.shard(bare_BLHK, "BLHK") if memory and a.position == "rope" else None,
            q_segments_BL=ctx.segments_BL,
            k_segments_BS=k_segments,
            q_offset=ctx.cache_index,
            sight=self.sight,
            scale=self.scale,
            softcap=a.softcap,
            bias=logit_bias(a, ctx, self.sight, self.span),
            shaping=self.shaping and self.shaping(),
            dropout_rate=a.dropout if ctx.key is not None else 0.0,
            dropout_key=ctx.dropout_key("weights"),
            tap=ctx.tap if ctx.taps else None,
            mesh=ctx.mesh,
            implementation=a.kernel if cache is None and not ctx.taps else "plain",
        )
        o_BLHV = ctx.tap("heads", ctx.shard(o_BLHV, "BLHK"))
        y_BLD = o_BLHV.reshape(*o_BLHV.shape[:2], -1) if self.output is None else self.output(o_BLHV, ctx)
        y_BLD = y_BLD + self.memory(x_BLD, ctx) if wide_slots(a) else y_BLD
        return y_BLD, cache, Aux({} if self.span is None else {"span_loss": self.span.loss(x_BLD, ctx)})

    def _bare(self, x_BLHK, norm):
        """Queries or keys without position."""
        return self._clip(x_BLHK if norm is None else norm(x_BLHK))

    def _rotated(self, x_BLHK, ctx: Context):
        rotates = self.config.position == "rope"
        return rotate(x_BLHK, ctx.positions_BL, self.config.rope) if rotates else x_BLHK

    def _clip(self, x):
        return jnp.clip(x, -self.config.clip, self.config.clip) if self.config.clip else x

    def slots(self, dtype):
        """Keys [M, G, K] and values [M, G, V] of the slots in the softmax as attention reads them, or None."""
        return self.memory(dtype) if softmax_slots(self.config) else None

    def init_cache(self, batch: int, length: int) -> dict:
        """Room for `length` tokens of each of `batch` sequences, and the memory slots as attention reads them."""
        entries = {name: jnp.zeros((batch, length, *shape), self.dtype) for name, shape in
                   cache_shapes(self.config, self.sizes).items()}  # fmt: skip
        memory = self.slots(jnp.dtype(self.dtype))
        return entries | ({"memory": memory} if memory else {})

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        a, sizes = block.attention, head_sizes(block.attention, model.width)
        total = sum((c.linear(*matrix) for matrix in matrices(block, model.width).values()), c.Costs())
        for shape in qk_norm_shapes(a, model.width).values():
            total += Norm.costs(math.prod(shape), a.qk_norm, block)
        total += memory_costs(model, block)
        total += c.weights(2 * (a.value == "identity_plus"))
        total += c.weights(a.heads * ((a.span == "adaptive") + {"none": 0, "skip_init": 2, "shaped": 3}[a.shaping]))
        mixing = 2 * a.heads * (sizes.qk + sizes.v) * length + relative_flops(model, block, length)
        entries = sum(math.prod(shape) for shape in cache_shapes(a, sizes).values())
        cache = entries * jnp.dtype(model.dtype).itemsize
        return total + c.Costs(flops_per_token=mixing, cache_bytes_per_token=cache)


def init_scale(model: ModelConfig, block: BlockConfig, name: str) -> float:
    """Scale of the first values of one of attention's matrices."""
    a = block.attention
    if name == "query" and a.shaping == "shaped":  # the weights start uniform: A = C (He & Hofmann 2023, sec. 3)
        return 0.0
    if name == "query" and a.query == "merged" and not a.rank:  # logits as large as those of W_Q W_K^T
        return math.sqrt(a.head_size) * kernel_std(model, model.width)
    if name in ("query", "key") and a.rank:  # so are those of A_h B_h^T, whatever its rank
        return (a.head_size / a.rank) ** 0.25
    if name == "output":
        return output_scale(model, block, "attention")
    return inner_scale(model, block) if name == "value" else 1.0


def heads_of(linear: Linear | None, x_BLD, heads: int, size: int, ctx: Context):
    """[B, L, heads, size]: through the matrix, or x itself cut among the heads or whole for all of them."""
    if linear is not None:
        return linear(x_BLD, ctx)
    # Without this the partitioner of jaxlib 0.10 adds up x's gradient wrongly where data, fsdp and tensor are all cut.
    x_BLD = ctx.shard(x_BLD, "BLD")
    if x_BLD.shape[-1] == heads * size:
        return x_BLD.reshape(*x_BLD.shape[:2], heads, size)
    return jnp.broadcast_to(x_BLD[:, :, None], (*x_BLD.shape[:2], heads, size))


def _extend(cache: dict, k_BLGK, v_BLGV, index) -> dict:
    """`cache` with keys and values written from position `index` on."""
    new = {name: x for name, x in (("key", k_BLGK), ("value", v_BLGV)) if name in cache}
    written = {name: jax.lax.dynamic_update_slice(cache[name], x.astype(cache[name].dtype), (0, index, 0, 0))
               for name, x in new.items()}  # fmt: skip
    return cache | written
