"""A linear map between named dimensions, and how its weights are drawn."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import ModelConfig
from xfresearch.models.context import Context


def kernel_std(model: ModelConfig, fan_in: int) -> float:
    """Standard deviation of a kernel: 1/sqrt(fan_in), or the config's constant (GPT-2's 0.02)."""
    return model.init_std if model.init == "normal" else 1.0 / math.sqrt(fan_in)


def draw(key, shape, std: float, model: ModelConfig):
    """Normal numbers cut at three standard deviations, in the dtype that parameters are kept in."""
    return std * jax.random.truncated_normal(key, -3, 3, shape, jnp.dtype(model.param_dtype))


def plus(x, bias):
    """x + bias in x's dtype. Added in the bias's dtype, float32 or wider: its gradient sums over all tokens in that dtype,
    where a sum in bfloat16 would be off by several per cent."""
    return (x.astype(bias.dtype) + bias).astype(x.dtype)


def times(x, factor):
    """x * factor in x's dtype, computed in the factor's for the same reason."""
    return (x.astype(factor.dtype) * factor).astype(x.dtype)


def rounded(parameter, dtype):
    """The numbers nearest to `parameter` that `dtype` has, in float32 or wider."""
    return parameter.astype(dtype).astype(jnp.promote_types(dtype, jnp.float32))


class Bias(nnx.Module):
    """A number for each of `rows` ids or dimensions."""

    def __init__(self, model: ModelConfig, rows: int):
        self.bias = nnx.Param(jnp.zeros(rows, model.param_dtype))


class Linear(nnx.Module):
    """y[..., outputs] = x[..., inputs] . kernel[inputs, outputs] + bias[outputs]."""

    def __init__(self, model: ModelConfig, inputs: tuple, outputs: tuple, bias: bool, rngs, scale: float = 1.0):
        self.axes = len(inputs)  # how many of x's last dimensions are inputs
        std = scale * kernel_std(model, math.prod(inputs))
        self.kernel = nnx.Param(draw(rngs.params(), (*inputs, *outputs), std, model))
        self.bias = nnx.Param(jnp.zeros(outputs, model.param_dtype)) if bias else None

    def __call__(self, x, ctx: Context | None = None):
        kernel = self.matrix().astype(x.dtype)
        batch, inputs, outputs = x.shape[: -self.axes], kernel.shape[: self.axes], kernel.shape[self.axes :]
        # As a product of two matrices: with more dimensions, XLA on CPU takes twice as long for some gradients. A
        # sequence cut over devices cannot be one dimension with the batch.
        rows = batch if ctx is not None and ctx.cuts("context") else (-1,)
        y = x.reshape(*rows, math.prod(inputs)) @ kernel.reshape(math.prod(inputs), math.prod(outputs))
        y = y.reshape(*batch, *outputs)
        return y if self.bias is None else plus(y, self.bias[...])

    def matrix(self):
        """The kernel as x meets it."""
        return self.kernel[...]


class IdentityPlus(Linear):
    """A linear map between dimensions of equal size whose matrix is a I + b W, with W = 0 and a = b = 1 at first, a, b and W
    trained (He & Hofmann 2023, eq. 6, and their code). Weight decay draws W, and not the sum, to 0."""

    def __init__(self, model: ModelConfig, inputs: tuple, outputs: tuple, bias: bool, rngs, scale: float = 1.0):
        super().__init__(model, inputs, outputs, bias, rngs, scale=0.0)
        self.identity_gain = nnx.Param(jnp.ones((), model.param_dtype))
        self.weight_gain = nnx.Param(jnp.ones((), model.param_dtype))

    def matrix(self):
        kernel = self.kernel[...]
        identity = jnp.eye(math.prod(kernel.shape[: self.axes]), dtype=kernel.dtype).reshape(kernel.shape)
        return self.identity_gain[...] * identity + self.weight_gain[...] * kernel
