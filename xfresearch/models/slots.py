"""What attention has besides its matrices: persistent memory slots, and the numbers of shaped attention.

Slots are M keys and values per key-value head, or one set for all, without position (Sukhbaatar et al. 2019, sec. 3). As in
the paper's code they are stored small and multiplied back when used: key ~ N(0, 1/K), Mk = sqrt(K) key; value ~ N(0, 1/M),
Mv = sqrt(M) value: an optimiser that scales each number's step thus moves them sqrt(K) and sqrt(M) times as far.

Parameters: M G (K + V), G = 1 where shared; 2 H or 3 H of shaping. FLOPs per token: 2 H (K + V) M.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels.attention import Shaping
from xfresearch.models.sizes import head_sizes, slot_heads


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
