"""Persistent memory slots: trained keys and values that every query sees.

There are two kinds of slots. Slots in the softmax of the heads have the sizes of the heads. Slots with an elementwise
activation have the width of the model and are not normalised:

    y = f(x k^T + b) v        k and v of size M x D, b of size M

This is the feed-forward layer written as a memory (Sukhbaatar et al. 2019, sec. 3; Geva et al. 2021, eq. 2): k is W_up
transposed, v is W_down.

Slots in the softmax are M keys and values for each key-value head, or one set for all heads. They have no position. As
in the paper's code they are stored with a smaller scale and multiplied when used: key ~ N(0, 1/K), Mk = sqrt(K) key;
value ~ N(0, 1/M), Mv = sqrt(M) value. An optimizer that normalises the step of each number therefore moves them sqrt(K)
and sqrt(M) times as far.

Parameters: M G (K + V), G = 1 if shared, or M (2 D + 1). FLOPs per token: 2 H (K + V) M, or 4 D M.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.models.context import Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.parameters import draw, kernel_std, parameter, plus
from xfresearch.models.place import Place
from xfresearch.models.sublayer import Memory, MemoryPart


def softmax_slots(a) -> int:
    """The number M of slots in the softmax of the heads."""
    return a.memory_slots if a.memory_activation == "softmax" else 0


def wide_slots(a) -> int:
    """The number M of slots of the model's width."""
    return a.memory_slots - softmax_slots(a)


def slot_heads(a) -> int:
    """The number of sets of slots: one for each key-value head, or 1 if all heads share them."""
    return a.kv_heads if a.memory_heads == "each" else 1


def slot_values(a) -> MemoryPart:
    """Where the values of the slots are."""
    if wide_slots(a):
        return MemoryPart("memory/value")
    through = "output/kernel" if a.output == "learned" else ""
    return MemoryPart("memory/value", math.sqrt(a.memory_slots), a.heads, through)


class HeadSlots(nnx.Module):
    """M slots in the softmax, for each key-value head or shared by all heads."""

    def __init__(self, place: Place, key_size: int, value_size: int, rngs):
        a = place.options
        dtype = jnp.dtype(place.param_dtype)
        M, G = a.memory_slots, slot_heads(a)
        self.key_gain = math.sqrt(key_size)
        self.value_gain = math.sqrt(M)
        key = jax.random.normal(rngs.params(), (M, G, key_size), dtype) / self.key_gain
        self.key = parameter(key, "MGK", "M", "K")
        value = jax.random.normal(rngs.params(), (M, G, value_size), dtype) / self.value_gain
        self.value = parameter(value, "MGK", "M", "K")

    def __call__(self, dtype) -> tuple[jax.Array, jax.Array]:
        """Keys [M, G, K] and values [M, G, V] in the scale that attention reads; G is 1 if they are shared."""
        return (self.key_gain * self.key[...]).astype(dtype), (self.value_gain * self.value[...]).astype(dtype)

    def memory(self, dtype, heads: int, output) -> Memory:
        """The memory of `heads` heads. output: the Linear W_O [H, V, D], or None if the heads are concatenated."""
        key_GMK, value_GMV = (x.swapaxes(0, 1) for x in self(dtype))
        value_HMV = jnp.repeat(value_GMV, heads // value_GMV.shape[0], 0)
        V = value_HMV.shape[-1]
        w_HVD = jnp.eye(heads * V, dtype=dtype).reshape(heads, V, -1) if output is None else output.kernel[...].astype(dtype)
        bias = None if output is None or output.bias is None else output.bias[...].astype(dtype)
        return Memory(key_GMK, value_GMV, jnp.einsum("hmv,hvd->hmd", value_HMV, w_HVD), bias=bias)

    @staticmethod
    def costs(a, key_size: int, value_size: int) -> Costs:
        M = a.memory_slots
        sizes = key_size + value_size
        return weights(M * slot_heads(a) * sizes) + Costs(flops_per_token=2 * M * a.heads * sizes)


class WideSlots(nnx.Module):
    """M slots of the model's width with an elementwise activation, initialised like a feed-forward layer."""

    def __init__(self, place: Place, rngs):
        M, D = place.options.memory_slots, place.width
        dtype = place.param_dtype
        self.activation = ACTIVATIONS[place.options.memory_activation]
        key = draw(rngs.params(), (M, D), place.inner_scale * kernel_std(place, D), dtype)
        self.key = parameter(key, "MD", "D", "M", bias="bias")
        self.bias = parameter(jnp.zeros(M, dtype), "M")
        value = draw(rngs.params(), (M, D), place.output_scale * kernel_std(place, M), dtype)
        self.value = parameter(value, "MD", "M", "D")

    def __call__(self, x_BLD, ctx: Context):
        key_MD, value_MD = (x[...].astype(x_BLD.dtype) for x in (self.key, self.value))
        hidden_BLM = self.activation.recomputed(ctx.tap("pre_activation", plus(x_BLD @ key_MD.T, self.bias[...])))
        return ctx.tap("coefficients", hidden_BLM) @ value_MD

    def memory(self, dtype, bias=None) -> Memory:
        """`bias` is added to the output of the slots."""
        key_MD, value_MD, bias_M = (x[...].astype(dtype) for x in (self.key, self.value, self.bias))
        return Memory(key_MD, value_MD, value_MD, biases=bias_M, bias=None if bias is None else bias[...].astype(dtype))

    @staticmethod
    def costs(a, width: int) -> Costs:
        M = a.memory_slots
        return weights(M * (2 * width + 1)) + Costs(flops_per_token=4 * M * width)
