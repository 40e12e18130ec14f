"""Norms, one function each, computed in float32 or wider.

layer: (x - mean) / sqrt(var + epsilon) * gain + bias   (Ba et al. 2016)
rms:   x / sqrt(mean(x^2) + epsilon) * gain             (Zhang & Sennrich 2019)
none:  x
"""

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models.costs import Costs, weights
from xfresearch.models.variants import NORMS, load


def layer(x, epsilon: float):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


def rms(x, epsilon: float):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


def none(x, epsilon: float):
    return x


class Norm(nnx.Module):
    """A norm over the last dimension, D unless `width` says otherwise, with the gain and bias that the block asks for."""

    def __init__(self, model: ModelConfig, kind: str, block: BlockConfig, width: int | None = None):
        self.kind, self.epsilon, width = kind, block.norm_epsilon, width or model.width
        gain, bias = _affine(kind, block)
        self.gain = nnx.Param(jnp.ones(width, model.param_dtype)) if gain else None
        self.bias = nnx.Param(jnp.zeros(width, model.param_dtype)) if bias else None

    def __call__(self, x_BLD):
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        y_BLD = load(NORMS[self.kind])(x_BLD.astype(wide), self.epsilon)
        if self.gain is not None:
            y_BLD = y_BLD * self.gain[...].astype(wide)
        if self.bias is not None:
            y_BLD = y_BLD + self.bias[...].astype(wide)
        return y_BLD.astype(x_BLD.dtype)

    @staticmethod
    def costs(width: int, kind: str, block: BlockConfig) -> Costs:
        return weights(width * sum(_affine(kind, block)))


def _affine(kind: str, block: BlockConfig) -> tuple[bool, bool]:
    """Whether a norm has a gain, and whether it has a bias."""
    return kind != "none" and block.norm_gain, kind == "layer" and block.norm_bias
