"""The values that travel from layer to layer: the residual stream, and named values that a kind declares.

A connection or a sublayer declares its values as {name: Carried}. The rest of the model carries them by name through scanned
and unrolled layers, also with rematerialisation and on a mesh.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp


class Carried(NamedTuple):
    """A value of each token that travels between layers.

    letters: of its dimensions, as in 'BLGK' (sharding/letters.py). sizes: of the dimensions after B and L.
    initial: before the first layer it is 0, or the embedding [B, L, D], broadcast to dimensions between L and D, or the
    embedding followed by zeros along the third dimension.
    tap: whether it is a tap after each sublayer whose connection declares it.
    """

    letters: str
    sizes: tuple[int, ...]
    initial: Literal["zeros", "embedding", "embedding_first"]
    tap: bool = False

    def before_the_first_layer(self, x_BLD):
        """The initial value, given the embedding."""
        shape = (*x_BLD.shape[:2], *self.sizes)
        if self.initial == "zeros":
            return jnp.zeros(shape, x_BLD.dtype)
        if self.initial == "embedding_first":
            return jnp.zeros(shape, x_BLD.dtype).at[:, :, 0].set(x_BLD)
        return jnp.broadcast_to(x_BLD.reshape(*x_BLD.shape[:2], *(1,) * (len(self.sizes) - 1), -1), shape)


class Stream(NamedTuple):
    """The residual stream between two sublayers, and the other values that travel with it, by name."""

    x_BLD: jax.Array
    values: Mapping[str, jax.Array] = {}
