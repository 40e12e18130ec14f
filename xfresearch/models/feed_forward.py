"""The feed-forward sublayer: two linear maps around an activation, plain or gated.

    plain:  y = f(x W_up + b) W_down + c                                 (Vaswani et al. 2017, eq. 2)
    gated:  y = (f(x W_gate + b) * (x W_up + b')) W_down + c             (Shazeer 2020, eq. 6)

Parameters: 2 D F, or 3 D F gated, and biases F + D (2 F + D gated).      FLOPs per token: 4 D F, or 6 D F gated.
"""

import jax
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models import costs as c
from xfresearch.models.context import Aux, Context
from xfresearch.models.layouts import output_scale
from xfresearch.models.linear import Linear
from xfresearch.models.variants import ACTIVATIONS, load


def gelu(x):
    """x times the normal distribution's cumulative function at x, exactly (jax.nn.gelu approximates it with tanh)."""
    return jax.nn.gelu(x, approximate=False)


class FeedForward(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        f, D = block.feed_forward, model.width
        self.activation = load(ACTIVATIONS[f.kind].function)
        self.up = Linear(model, (D,), (f.hidden,), f.bias, rngs)
        self.gate = Linear(model, (D,), (f.hidden,), f.bias, rngs) if ACTIVATIONS[f.kind].gated else None
        self.down = Linear(model, (f.hidden,), (D,), f.bias, rngs, scale=output_scale(model, block))

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache as it was, and nothing besides."""
        h_BLF = self.up(x_BLD)
        h_BLF = self.activation(h_BLF) if self.gate is None else self.activation(self.gate(x_BLD)) * h_BLF
        return self.down(ctx.tap("hidden", h_BLF)), cache, Aux()

    def init_cache(self, batch: int, length: int) -> dict:
        return {}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> c.Costs:
        f, D = block.feed_forward, model.width
        into = 2 if ACTIVATIONS[f.kind].gated else 1
        return c.linear((D,), (f.hidden,), f.bias) * into + c.linear((f.hidden,), (D,), f.bias)
