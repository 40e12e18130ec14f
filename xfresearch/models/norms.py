"""Norms, one function each, computed in float32 or wider. LayerNorm is `scale` after `project` (Brody et al. 2023, eq. 3).

layer:    (x - mean) / sqrt(var + epsilon)            Ba et al. 2016
rms:      x / sqrt(mean(x^2) + epsilon)               Zhang & Sennrich 2019
scale:    the same function, under the name that it has as the second half of LayerNorm: length sqrt(D), as LayerNorm
          has (the published code of Brody et al. has length 1/sqrt(D), which is D times less)
project:  x - mean: the first half of LayerNorm, orthogonal to (1, ..., 1), not rescaled
dyt:      tanh(alpha x), alpha one trained number     Zhu et al. 2025, eq. 1
none:     x

and then, as the block says, times a gain (plus norm_offset) and plus a bias, D numbers each. No matrix products.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models.costs import Costs, weights
from xfresearch.models.linear import plus, rounded, times
from xfresearch.models.variants import NORMS, load


def layer(x, epsilon: float):
    return scale(project(x, epsilon), epsilon)


def project(x, epsilon: float):
    return x - x.mean(-1, keepdims=True)


def scale(x, epsilon: float):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


rms = scale


def dyt(x, epsilon: float):
    return jnp.tanh(x)


def none(x, epsilon: float):
    return x


class Norm(nnx.Module):
    """A norm over the last dimensions, D or those of `shape`, with the gain and bias that the block asks for."""

    def __init__(self, model: ModelConfig, kind: str, block: BlockConfig, shape: tuple[int, ...] = ()):
        self.kind, self.epsilon, self.cast, self.offset = kind, block.norm_epsilon, block.norm_cast, block.norm_offset
        gain, bias, alpha = _trained(kind, block)
        shape = shape or (model.width,)
        self.axes = len(shape)
        self.gain = nnx.Param(jnp.full(shape, 1 - self.offset, model.param_dtype)) if gain else None
        self.bias = nnx.Param(jnp.zeros(shape, model.param_dtype)) if bias else None
        self.alpha = nnx.Param(jnp.full((), block.norm_alpha, model.param_dtype)) if alpha else None

    def __call__(self, x_BLD):
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        y_BLD = x_BLD.astype(wide)
        if self.alpha is not None:
            y_BLD = y_BLD * self.alpha[...].astype(wide)
        y_BLD = load(NORMS[self.kind])(y_BLD.reshape(*x_BLD.shape[: -self.axes], -1), self.epsilon)
        y_BLD = y_BLD.reshape(x_BLD.shape)
        if self.cast == "before_gain":  # each step rounded to x's dtype, and computed in float32 for the gradients' sums
            return self._affine(y_BLD.astype(x_BLD.dtype))
        return self._affine(y_BLD).astype(x_BLD.dtype)

    def _affine(self, y_BLD):
        """y times the gain, plus the bias, both rounded to y's dtype."""
        if self.gain is not None:
            y_BLD = times(y_BLD, rounded(self.offset + self.gain[...], y_BLD.dtype))
        if self.bias is not None:
            y_BLD = plus(y_BLD, rounded(self.bias[...], y_BLD.dtype))
        return y_BLD

    @staticmethod
    def costs(width: int, kind: str, block: BlockConfig) -> Costs:
        gain, bias, alpha = _trained(kind, block)
        return weights(width * (gain + bias) + alpha)


def _trained(kind: str, block: BlockConfig) -> tuple[bool, bool, bool]:
    """Whether a norm has a gain, a bias, and DyT's alpha."""
    return kind != "none" and block.norm_gain, kind != "none" and block.norm_bias, kind == "dyt"
