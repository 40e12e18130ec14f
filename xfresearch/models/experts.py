"""The experts of a mixture: E feed-forward networks in one module, and what they have in common.

Parameters: E n D F, n = 3 for gated experts and 2 for plain. FLOPs per row: 2 n D F.
"""

import math
from dataclasses import replace

from flax import nnx

from xfresearch.config import BlockConfig, FeedForwardConfig, ModelConfig, MoeConfig
from xfresearch.models.feed_forward import input_width, value_std
from xfresearch.models.layouts import inner_scale, output_scale
from xfresearch.models.linear import draw, kernel_std
from xfresearch.models.variants import ACTIVATIONS, load


def slots(moe: MoeConfig, length: int) -> int:
    """C: how many tokens of a sequence of `length` an expert takes at most."""
    return min(math.ceil(moe.capacity * moe.top_k * length / moe.experts), length)


def shared_block(block: BlockConfig) -> BlockConfig:
    """The block whose feed-forward is the shared experts: side by side they are one of their summed hidden size."""
    f = block.feed_forward
    return replace(block, feed_forward=FeedForwardConfig(kind=f.moe.expert, hidden=f.moe.shared * f.hidden))


class Experts(nnx.Module):
    """E feed-forward networks, their kernels stacked."""

    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        moe, D, F = block.feed_forward.moe, input_width(model, block), block.feed_forward.hidden
        activation = ACTIVATIONS[moe.expert]
        self.kind, self.activation, self.kernel = moe.expert, load(activation.function), moe.kernel
        into, std = (moe.experts, D, F), inner_scale(model, block) * kernel_std(model, D)
        self.up = nnx.Param(draw(rngs.params(), into, std, model))
        self.gate = nnx.Param(draw(rngs.params(), into, std, model)) if activation.gated else None
        std = output_scale(model, block, "feed_forward") * value_std(model, moe.expert, F)
        self.down = nnx.Param(draw(rngs.params(), (moe.experts, F, model.width), std, model))

    @property
    def count(self) -> int:
        return self.up.shape[0]

    def kernels(self, dtype) -> dict:
        """The kernels by name, in the dtype of the computation."""
        kernels = {"up": self.up, "gate": self.gate, "down": self.down}
        return {name: kernel[...].astype(dtype) for name, kernel in kernels.items() if kernel is not None}

    def __call__(self, kernels: dict, x, product, tap):
        """y: each row of x through its expert. product(x, kernel) multiplies rows with their experts'; `tap` sees h."""
        h = product(x, kernels["up"])
        h = self.activation(h) if self.gate is None else self.activation(product(x, kernels["gate"])) * h
        return product(tap(h), kernels["down"])
