"""How parameters are made, and how biases and gains are applied."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.sharding.letters import Axes


class Rngs:
    """The keys of a module's initial parameters, with the values of nnx.Rngs(params=key).

    nnx.Rngs counts in a Variable. Under a trace, each of its draws prints the whole trace into an error message that is
    then dropped: half of the time of `transformer.abstract`.
    """

    def __init__(self, key):
        self.key = key
        self.count = 0

    def params(self):
        """The next key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)


def parameter(value, letters: str, inputs: str = "", outputs: str = "", bounds=None, bias: str = "") -> nnx.Param:
    """A trained array. letters, inputs, outputs, bounds and bias are those of `Axes`, without the N of stacked layers."""
    return nnx.Param(value, axes=Axes(letters, inputs, outputs, bounds, bias))


def kernel_std(place, fan_in: int) -> float:
    """Standard deviation of an initial kernel: 1/sqrt(fan_in), or the constant of the config (GPT-2: 0.02)."""
    return place.init_std or 1.0 / math.sqrt(fan_in)


def draw(key, shape: tuple, std: float, dtype: str):
    """Normal numbers, truncated at three standard deviations."""
    return std * jax.random.truncated_normal(key, -3, 3, shape, jnp.dtype(dtype))


def plus(x, bias):
    """x + bias in the dtype of x. The sum is computed in the dtype of the bias, float32 or wider, because the gradient
    of the bias sums over all tokens in that dtype. In bfloat16 this sum would be off by several per cent."""
    return (x.astype(bias.dtype) + bias).astype(x.dtype)


def times(x, factor):
    """x * factor in the dtype of x, computed in the dtype of the factor for the same reason."""
    return (x.astype(factor.dtype) * factor).astype(x.dtype)


def rounded(parameter, dtype):
    """`parameter` rounded to `dtype`, but stored in float32 or wider."""
    return parameter.astype(dtype).astype(jnp.promote_types(dtype, jnp.float32))


def with_params(split, params: dict):
    """The module whose nnx.split of abstract parameters is `split`, with the nested dict `params`. The split is not
    changed, so that callers may cache it."""
    graph, state = split
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
