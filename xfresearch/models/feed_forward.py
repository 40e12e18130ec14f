"""The feed-forward sublayer: two linear maps around an activation, plain or gated.

    plain:  y = f(x W_up + b) W_down + c                                 (Vaswani et al. 2017, eq. 2)
    gated:  y = (f(x W_gate + b) * (x W_up + b')) W_down + c             (Shazeer 2020, eq. 6)

Read as a memory (Geva et al. 2021): the columns of W_up are keys, the rows of W_down values, and what stands between
them are the coefficients. Gated kinds have the columns of W_gate as keys, those of W_up as multipliers. `softmax` makes
it cross-attention to a trained sequence of F keys and values.

SoLU (Elhage et al. 2022): f(x) = x * softmax(x), and a LayerNorm before W_down, with a gain and a bias. The norm reads
x exp(x - max x), the same but for a factor of each token, which a norm takes out: the variance of x softmax(x) is so small
(1.3e-6 at F = 3072) that the norm's epsilon would decide its output.

Parameters: 2 D F, or 3 D F gated, and biases F + D (2 F + D gated); 2 F for SoLU's norm. D is the width of what is read:
heads * their size under layout = 'fused_output'.      FLOPs per token: 2 per weight of a matrix.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models import costs as c
from xfresearch.models.context import Aux, Context
from xfresearch.models.layouts import LAYOUTS, inner_scale, output_scale
from xfresearch.models.linear import Linear, kernel_std
from xfresearch.models.norms import Norm
from xfresearch.models.sizes import head_sizes
from xfresearch.models.variants import ACTIVATIONS, load


def identity(x):
    return x


def gelu(x):
    """x times the normal distribution's cumulative function at x, exactly (jax.nn.gelu approximates it with tanh)."""
    return jax.nn.gelu(x, approximate=False)


def relu2(x):
    """max(x, 0)^2 (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


def solu(x):
    return x * jax.nn.softmax(x, -1)


def softmax_total(x_BLF):
    """sum exp(x - max x) [B, L, 1]: what SoLU's softmax divides by, less a power of e."""
    return jnp.exp(jax.nn.logsumexp(x_BLF, -1, keepdims=True) - x_BLF.max(-1, keepdims=True))


def value_std(model: ModelConfig, kind: str, hidden: int) -> float:
    """Standard deviation of W_down, whose rows are values. Under softmax they are drawn N(0, 1) as memory slots are: a mean
    of F values with weights near 1/F would be 1/F otherwise, and is sqrt(e / F) so."""
    std = kernel_std(model, hidden)
    return std * hidden**0.5 if kind == "softmax" else std


def input_width(model: ModelConfig, block: BlockConfig) -> int:
    """Width of what a feed-forward reads: the residual stream's, or that of the heads side by side."""
    a = block.attention
    return a.heads * head_sizes(a, model.width).v if LAYOUTS[block.layout].fused else model.width


def hidden_norm_block(block: BlockConfig) -> BlockConfig:
    """What SoLU's LayerNorm has, whatever the block's norms have: a gain, as it is, and a bias."""
    return replace(block, norm_gain=True, norm_offset=0.0, norm_bias=True)


class FeedForward(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        f, activation, scale = block.feed_forward, ACTIVATIONS[block.feed_forward.kind], inner_scale(model, block)
        D = input_width(model, block)
        self.activation = load(activation.function)
        self.up = Linear(model, (D,), (f.hidden,), f.bias, rngs, scale=scale)
        self.gate = Linear(model, (D,), (f.hidden,), f.bias, rngs, scale=scale) if activation.gated else None
        self.hidden_norm = Norm(model, "layer", hidden_norm_block(block), (f.hidden,)) if activation.norm else None
        scale = output_scale(model, block, "feed_forward") * value_std(model, f.kind, f.hidden)
        self.down = Linear(model, (f.hidden,), (model.width,), f.bias, rngs, scale / kernel_std(model, f.hidden))

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache as it was, and nothing besides."""
        h_BLF = ctx.shard(self.up(x_BLD, ctx), "BLF")
        scale_BL1 = None if self.hidden_norm is None else softmax_total(h_BLF)
        h_BLF = self.activation(h_BLF) if self.gate is None else self.activation(self.gate(x_BLD, ctx)) * h_BLF
        h_BLF = ctx.tap("hidden", h_BLF)
        h_BLF = h_BLF if self.hidden_norm is None else self.hidden_norm(scale_BL1 * h_BLF)
        return self.down(ctx.tap("coefficients", h_BLF), ctx), cache, Aux()

    def init_cache(self, batch: int, length: int) -> dict:
        return {}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        f, D, activation = block.feed_forward, input_width(model, block), ACTIVATIONS[block.feed_forward.kind]
        total = c.linear((D,), (f.hidden,), f.bias) * (2 if activation.gated else 1)
        total += Norm.costs(f.hidden, "layer", hidden_norm_block(block)) if activation.norm else c.Costs()
        return total + c.linear((f.hidden,), (model.width,), f.bias)
