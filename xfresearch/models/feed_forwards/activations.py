"""Activations of feed-forward layers. Their names are values of `feed_forward.kind`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


def identity(x):
    return x


def gelu(x):
    """x times the cumulative distribution function of N(0, 1) at x (jax.nn.gelu approximates it with tanh)."""
    return jax.nn.gelu(x, approximate=False)


def relu2(x):
    """max(x, 0)^2 (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


def solu(x):
    """x softmax(x) (Elhage et al. 2022)."""
    return x * jax.nn.softmax(x, -1)


class Activation(NamedTuple):
    function: Callable
    gated: bool = False  # f(x W_gate) * x W_up instead of f(x W_up)
    norm: bool = False  # a LayerNorm follows
    elementwise: bool = True  # it acts on each hidden unit separately


ACTIVATIONS = {
    "relu": Activation(jax.nn.relu),
    "relu2": Activation(relu2),
    "gelu": Activation(gelu),
    "gelu_tanh": Activation(jax.nn.gelu),
    "swish": Activation(jax.nn.silu),
    "softmax": Activation(jax.nn.softmax, elementwise=False),
    "solu": Activation(solu, norm=True, elementwise=False),
    "glu": Activation(jax.nn.sigmoid, gated=True),
    "bilinear": Activation(identity, gated=True),
    "reglu": Activation(jax.nn.relu, gated=True),
    "geglu": Activation(gelu, gated=True),
    "geglu_tanh": Activation(jax.nn.gelu, gated=True),
    "swiglu": Activation(jax.nn.silu, gated=True),
}
