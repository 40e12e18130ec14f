"""What attention has besides its matrices: persistent memory slots, and the numbers of shaped attention.

Slots are of two kinds. Those that join the heads' softmax have the sizes of the heads; those under an elementwise activation
have the model's width and are not normalised:

    y = f(x k^T + b) v        k and v of size M x D, b of size M

which is the feed-forward layer restated as memory (Sukhbaatar et al. 2019, sec. 3; Geva et al. 2021, eq. 2): k is W_up
transposed, v is W_down.

In the softmax they are M keys and values per key-value head, or one set for all, without position. As in
the paper's code they are stored small and multiplied back when used: key ~ N(0, 1/K), Mk = sqrt(K) key; value ~ N(0, 1/M),
Mv = sqrt(M) value: an optimiser that scales each number's step thus moves them sqrt(K) and sqrt(M) times as far.

Parameters: M G (K + V), G = 1 where shared, or M (2 D + 1); 2 H or 3 H of shaping. FLOPs per token: 2 H (K + V) M, or
4 D M.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels.attention import Shaping
from xfresearch.models.context import Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.layouts import inner_scale, output_scale
from xfresearch.models.linear import draw, kernel_std, plus
from xfresearch.models.sizes import head_sizes, slot_heads, wide_slots
from xfresearch.models.variants import ACTIVATIONS, load


class Memory(nnx.Module):
    """M persistent key-value slots, of each key-value head or shared by all."""

    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        a, sizes = block.attention, head_sizes(block.attention, model.width)
        M, G, dtype = a.memory_slots, slot_heads(a), jnp.dtype(model.param_dtype)
        self.key_gain, self.value_gain = math.sqrt(sizes.qk), math.sqrt(M)
        key, value = (M, G, sizes.qk), (M, G, sizes.v)
        self.key = nnx.Param(jax.random.normal(rngs.params(), key, dtype) / self.key_gain)
        self.value = nnx.Param(jax.random.normal(rngs.params(), value, dtype) / self.value_gain)

    def __call__(self, dtype):
        """Keys [M, G, K] and values [M, G, V] as attention reads them; G is 1 where they are shared."""
        return (self.key_gain * self.key[...]).astype(dtype), (self.value_gain * self.value[...]).astype(dtype)


class WideMemory(nnx.Module):
    """M slots of the model's width, read under an elementwise activation; drawn as a feed-forward is."""

    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        M, D = block.attention.memory_slots, model.width
        self.activation = load(ACTIVATIONS[block.attention.memory_activation].function)
        self.key = nnx.Param(draw(rngs.params(), (M, D), inner_scale(model, block) * kernel_std(model, D), model))
        self.bias = nnx.Param(jnp.zeros(M, model.param_dtype))
        std = output_scale(model, block, "attention") * kernel_std(model, M)
        self.value = nnx.Param(draw(rngs.params(), (M, D), std, model))

    def __call__(self, x_BLD, ctx: Context):
        key, value = (x[...].astype(x_BLD.dtype) for x in (self.key, self.value))
        hidden_BLM = self.activation(plus(x_BLD @ key.T, self.bias[...]))
        return ctx.tap("coefficients", hidden_BLM) @ value


def make_memory(model: ModelConfig, block: BlockConfig, rngs):
    return (WideMemory if wide_slots(block.attention) else Memory)(model, block, rngs)


def memory_costs(model: ModelConfig, block: BlockConfig) -> Costs:
    """Weights and products of a block's slots, of whichever kind."""
    a, M = block.attention, block.attention.memory_slots
    if wide_slots(a):
        return weights(M * (2 * model.width + 1)) + Costs(flops_per_token=4 * M * model.width)
    sizes = head_sizes(a, model.width)
    products = 2 * M * a.heads * (sizes.qk + sizes.v)
    return weights(M * slot_heads(a) * (sizes.qk + sizes.v)) + Costs(flops_per_token=products)


class ShapingGains(nnx.Module):
    """The trained numbers per head of shaped attention: I, A and C weigh 1 each at first, of V-SkipInit I alone does."""

    def __init__(self, model: ModelConfig, block: BlockConfig):
        a, dtype = block.attention, model.param_dtype
        shaped = a.shaping == "shaped"
        self.identity = nnx.Param(jnp.ones(a.heads, dtype))
        self.weights = nnx.Param(jnp.full(a.heads, float(shaped), dtype))
        self.uniform = nnx.Param(jnp.ones(a.heads, dtype)) if shaped else None

    def __call__(self) -> Shaping:
        uniform = jnp.zeros_like(self.identity[...]) if self.uniform is None else self.uniform[...]
        return Shaping(self.identity[...], self.weights[...], uniform)
