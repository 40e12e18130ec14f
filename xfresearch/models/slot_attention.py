"""Attention to persistent memory slots alone: a layer that acts on each token by itself.

    softmax        q_BLHK = x W_Q    o = softmax(scale q Mk^T) Mv    y = o W_O        slots of the heads' sizes
    elementwise    y = f(x k^T + b) v + c                                             slots of the model's width

The first is the memory of All-attention (Sukhbaatar et al. 2019) without the context; the second is the feed-forward layer,
exactly, with c under bias = ('output',). Both are controls of the question whether the feed-forward is a memory.

Parameters: D H K + H V D and their biases, and those of the slots (models/slots.py). FLOPs per token: 2 per weight of the
matrices, and those of the slots. Cache: none.
"""

import jax
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.kernels.plain_attention import mix, scores
from xfresearch.kernels.softcap import softcapped
from xfresearch.models import costs as c
from xfresearch.models.attention import heads_of, init_scale
from xfresearch.models.context import Aux, Context
from xfresearch.models.linear import Bias, Linear, plus
from xfresearch.models.sizes import has_heads, head_sizes, logit_scale, matrices
from xfresearch.models.slots import make_memory, memory_costs


class SlotAttention(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        a, D = block.attention, model.width
        self.config, self.sizes = a, head_sizes(a, D)
        self.scale = logit_scale(a, D) if has_heads(a) else 1.0
        linears = {name: Linear(model, *matrix, rngs, scale=init_scale(model, block, name))
                   for name, matrix in matrices(block, D).items()}  # fmt: skip
        alone = Bias(model, D) if "output" in a.bias and not has_heads(a) else None
        self.query, self.output = linears.get("query"), linears.get("output", alone)
        self.memory = make_memory(model, block, rngs)

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache as it was, and nothing besides."""
        return (self._by_heads if has_heads(self.config) else self._wide)(x_BLD, ctx), cache, Aux()

    def _wide(self, x_BLD, ctx: Context):
        y_BLD = self.memory(x_BLD, ctx)
        return y_BLD if self.output is None else plus(y_BLD, self.output.bias[...])

    def _by_heads(self, x_BLD, ctx: Context):
        a, (key_MGK, value_MGV) = self.config, self.memory(x_BLD.dtype)
        q_BLHK = ctx.shard(ctx.tap("query", heads_of(self.query, x_BLD, a.heads, self.sizes.qk, ctx)), "BLHK")
        logits_BHLM = scores(q_BLHK, key_MGK) * (self.scale * self.sizes.qk**0.5)
        weights_BHLM = jax.nn.softmax(softcapped(logits_BHLM, a.softcap), -1)
        weights_BHLM = ctx.tap("coefficients", ctx.dropout(weights_BHLM, a.dropout, "weights"))
        o_BLHV = mix(weights_BHLM.astype(x_BLD.dtype), value_MGV).astype(x_BLD.dtype)
        o_BLHV = ctx.tap("heads", ctx.shard(o_BLHV, "BLHK"))
        return o_BLHV.reshape(*o_BLHV.shape[:2], -1) if self.output is None else self.output(o_BLHV, ctx)

    def slots(self, dtype):
        """Keys [M, G, K] and values [M, G, V] of slots in the softmax."""
        return self.memory(dtype)

    def init_cache(self, batch: int, length: int) -> dict:
        return {}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        total = sum((c.linear(*matrix) for matrix in matrices(block, model.width).values()), memory_costs(model, block))
        alone = not has_heads(block.attention) and "output" in block.attention.bias
        return total + c.weights(model.width * alone)
