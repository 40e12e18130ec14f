"""The layer before the output matrix, as in BERT's masked-language head (Devlin et al. 2019, their run_pretraining.py).

    logits = norm(f(x W + b)) E^T + c        x: after the final norm, E: the output matrix, c: `head_bias`

Parameters: D^2 + D, and those of the norm. FLOPs per token: 2 D^2.
"""

from flax import nnx

from xfresearch.models.costs import Costs
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.norms import Norm
from xfresearch.models.token_stack import TokenStackConfig


class HeadLayer(nnx.Module):
    """y_BLD = norm(f(x_BLD W + b)) with an activation f. The norm has the options of the first block."""

    def __init__(self, config: TokenStackConfig, activation: str, norm: str, rngs):
        self.activation = activation
        self.dense = Linear(config.around, shape(config.width), rngs, bias=True)
        self.norm = Norm(config.norm_spec(norm), "D", (config.width,), config.param_dtype)

    def __call__(self, x_BLD):
        return self.norm(ACTIVATIONS[self.activation](self.dense(x_BLD)))


def shape(width: int) -> Shape:
    """The shape of W. Its outputs have the letter of hidden units, so that a mesh shards both of its dimensions."""
    return Shape("D->F", width, width)


def costs(config: TokenStackConfig, norm: str) -> Costs:
    """Costs per token."""
    return shape(config.width).costs(bias=True) + config.norm_spec(norm).costs(config.width)
