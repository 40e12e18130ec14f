"""Softmax attention, with optional persistent memory slots in the same softmax.

Multi-head attention (Vaswani et al. 2017, eq. 1), with G key-value heads for H query heads (Ainslie et al. 2023):

    q_BLHK = x W_Q    k_BSGK = x W_K    v_BSGK = x W_V
    o = softmax([q Mk^T, q k^T] / sqrt(K)) [Mv; v]        y = o W_O

Mk and Mv are M persistent keys and values per key-value head, without position (Sukhbaatar et al. 2019, sec. 3). As in the
paper's code they are stored small and multiplied back when used: key ~ N(0, 1/K), Mk = sqrt(K) key; value ~ N(0, 1/M),
Mv = sqrt(M) value. A per-parameter optimiser thus moves them sqrt(K) and sqrt(M) times as far.

Parameters: D H K + 2 D G K + H K D + 2 M G K, and biases H K + 2 G K + D.
FLOPs per token: 2 (2 D H K + 2 D G K) + 4 H K (L + M).      Cache per token: 2 G K values.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels.attention import attention
from xfresearch.models import costs as c
from xfresearch.models.context import Aux, Context
from xfresearch.models.layouts import output_scale
from xfresearch.models.linear import Linear
from xfresearch.models.positions import rope


class Memory(nnx.Module):
    """M persistent key-value slots per key-value head."""

    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        a = block.attention
        shape, dtype = (a.memory_slots, a.kv_heads, a.head_size), jnp.dtype(model.param_dtype)
        self.key_gain, self.value_gain = math.sqrt(a.head_size), math.sqrt(a.memory_slots)
        self.key = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) / self.key_gain)
        self.value = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) / self.value_gain)

    def __call__(self, dtype):
        """Keys and values [M, G, K] as attention reads them."""
        return (self.key_gain * self.key[...]).astype(dtype), (self.value_gain * self.value[...]).astype(dtype)


class Attention(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        a, D = block.attention, model.width
        self.config, self.dtype, self.causal = a, model.dtype, model.causal
        heads, kv_heads = (a.heads, a.head_size), (a.kv_heads, a.head_size)
        self.query = Linear(model, (D,), heads, a.bias, rngs)
        self.key = Linear(model, (D,), kv_heads, a.bias, rngs)
        self.value = Linear(model, (D,), kv_heads, a.bias, rngs)
        self.output = Linear(model, heads, (D,), a.bias, rngs, scale=output_scale(model, block))
        self.memory = Memory(model, block, rngs) if a.memory_slots else None

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache with this call's keys and values in it (None without one), and nothing besides."""
        q_BLHK = self._rotate(self.query(x_BLD), ctx)
        k_BLGK = self._rotate(self.key(x_BLD), ctx)
        q_BLHK, k_BLGK = ctx.tap("query", q_BLHK), ctx.tap("key", k_BLGK)
        v_BLGK = ctx.tap("value", self.value(x_BLD))
        if cache is None:
            k_BSGK, v_BSGK, k_segments = k_BLGK, v_BLGK, ctx.segments_BL
            memory = self.memory and self.memory(x_BLD.dtype)
        else:
            cache = _extend(cache, k_BLGK, v_BLGK, ctx.cache_index)
            k_BSGK, v_BSGK, k_segments, memory = (
                cache["key"],
                cache["value"],
                ctx.cache_segments_BS,
                cache.get("memory"),
            )
        o_BLHK = attention(
            q_BLHK,
            k_BSGK,
            v_BSGK,
            memory=memory,
            q_segments_BL=ctx.segments_BL,
            k_segments_BS=k_segments,
            q_offset=ctx.cache_index,
            causal=self.causal,
            dropout_rate=self.config.dropout if ctx.key is not None else 0.0,
            dropout_key=ctx.dropout_key("weights"),
            implementation=self.config.kernel if cache is None else "plain",
        )
        return self.output(ctx.tap("heads", o_BLHK)), cache, Aux()

    def _rotate(self, x_BLHK, ctx: Context):
        return rope(x_BLHK, ctx.positions_BL, self.config.rope_theta) if self.config.position == "rope" else x_BLHK

    def init_cache(self, batch: int, length: int) -> dict:
        """Room for `length` tokens of each of `batch` sequences, and the memory slots as attention reads them."""
        zeros_BSGK = jnp.zeros((batch, length, self.config.kv_heads, self.config.head_size), self.dtype)
        memory = {"memory": self.memory(jnp.dtype(self.dtype))} if self.memory else {}
        return {"key": zeros_BSGK, "value": zeros_BSGK, **memory}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        a, D = block.attention, model.width
        heads, kv_heads, kv = (a.heads, a.head_size), (a.kv_heads, a.head_size), a.kv_heads * a.head_size
        total = c.linear((D,), heads, a.bias) + c.linear((D,), kv_heads, a.bias) * 2 + c.linear(heads, (D,), a.bias)
        total += c.weights(2 * a.memory_slots * kv)
        mixing = 4 * a.heads * a.head_size * (length + a.memory_slots)
        return total + c.Costs(flops_per_token=mixing, cache_bytes_per_token=2 * kv * jnp.dtype(model.dtype).itemsize)


def _extend(cache: dict, k_BLGK, v_BLGK, index) -> dict:
    """`cache` with keys and values written from position `index` on."""
    at = (0, index, 0, 0)
    key = jax.lax.dynamic_update_slice(cache["key"], k_BLGK.astype(cache["key"].dtype), at)
    value = jax.lax.dynamic_update_slice(cache["value"], v_BLGK.astype(cache["value"].dtype), at)
    return {**cache, "key": key, "value": value}
