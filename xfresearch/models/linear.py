"""Linear maps between dimensions that have letters."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from xfresearch.models.context import Context
from xfresearch.models.costs import Costs
from xfresearch.models.parameters import draw, kernel_std, parameter, plus, times
from xfresearch.models.place import Place


class Shape:
    """The dimensions of a linear map: letters such as "D->HK", and the size of each letter."""

    def __init__(self, letters: str, *sizes: int):
        self.inputs, self.outputs = letters.split("->")
        self.sizes = sizes

    @property
    def in_sizes(self) -> tuple[int, ...]:
        return self.sizes[: len(self.inputs)]

    @property
    def out_sizes(self) -> tuple[int, ...]:
        return self.sizes[len(self.inputs) :]

    def costs(self, bias: bool = False) -> Costs:
        """Costs per token."""
        kernel = math.prod(self.sizes)
        count = kernel + (math.prod(self.out_sizes) if bias else 0)
        return Costs(count, count, 2 * kernel)


class Bias(nnx.Module):
    """One trained number for each index of the dimensions, initially 0."""

    def __init__(self, letters: str, sizes: tuple[int, ...], param_dtype: str):
        self.bias = parameter(jnp.zeros(sizes, param_dtype), letters)


class Linear(nnx.Module):
    """y[..., outputs] = x[..., inputs] . kernel[inputs, outputs] + bias[outputs]."""

    def __init__(self, place: Place, shape: Shape, rngs, *, bias: bool = False, scale: float = 1.0):
        self.axes = len(shape.inputs)  # how many of x's last dimensions are inputs
        std = scale * kernel_std(place, math.prod(shape.in_sizes))
        kernel = draw(rngs.params(), shape.sizes, std, place.param_dtype)
        self.kernel = parameter(kernel, shape.inputs + shape.outputs, shape.inputs, shape.outputs, bias="bias")
        self.bias = parameter(jnp.zeros(shape.out_sizes, place.param_dtype), shape.outputs) if bias else None
        self.kernel_adapter: Any = nnx.data(None)  # adapters.py attaches it

    def __call__(self, x, ctx: Context | None = None):
        kernel = self.matrix().astype(x.dtype)
        batch = x.shape[: -self.axes]
        inputs, outputs = kernel.shape[: self.axes], kernel.shape[self.axes :]
        # This is a product of two matrices: with more dimensions, XLA on CPU takes twice as long for some gradients. A
        # sharded sequence dimension cannot be merged with the batch.
        rows = batch if ctx is not None and ctx.shards("context") else (-1,)
        x = x.reshape(*rows, math.prod(inputs))
        y = x @ kernel.reshape(math.prod(inputs), math.prod(outputs))
        y = y if self.kernel_adapter is None else y + self.adapted(x)
        y = y.reshape(*batch, *outputs)
        return y if self.bias is None else plus(y, self.bias[...])

    def matrix(self):
        """The matrix that multiplies x."""
        return self.kernel[...]

    def adapted(self, x):
        """What the adapter adds to the product of these rows with the matrix."""
        return self.kernel_adapter(x)


class IdentityPlus(Linear):
    """A linear map between dimensions of equal size with the matrix a I + b W. a, b and W are trained, initially
    a = b = 1 and W = 0 (He & Hofmann 2023, eq. 6, and their code). Weight decay acts on W, not on the sum."""

    def __init__(self, place: Place, shape: Shape, rngs, *, bias: bool = False, scale: float = 1.0):
        super().__init__(place, shape, rngs, bias=bias, scale=0.0)
        self.identity_gain = parameter(jnp.ones((), place.param_dtype), "")
        self.weight_gain = parameter(jnp.ones((), place.param_dtype), "")

    def matrix(self):
        return identity_plus(self.kernel[...], self.identity_gain[...], self.weight_gain[...])

    def adapted(self, x):
        return times(super().adapted(x), self.weight_gain[...])


def identity_plus(kernel, identity_gain, weight_gain):
    """a I + b W, of the shape of the kernel, whose first dimension is the input."""
    identity = np.eye(len(kernel), dtype=kernel.dtype).reshape(kernel.shape)
    return identity_gain * identity + weight_gain * kernel
