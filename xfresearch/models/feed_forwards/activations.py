"""Activations of feed-forward layers. Their names are values of `feed_forward.kind`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.models.recompute import recomputed


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


def activated(function: Callable, pre, multiplier=None):
    """function(pre), times the multiplier if there is one. The backward pass keeps the two arguments alone."""
    if multiplier is None:
        return recomputed(function, pre)
    return recomputed(lambda pre, multiplier: function(pre) * multiplier, pre, multiplier)


class Activation(NamedTuple):
    title: str  # its name in text for people
    function: Callable
    gated: bool = False  # f(x W_gate) * x W_up instead of f(x W_up)
    norm: bool = False  # a LayerNorm follows
    elementwise: bool = True  # it acts on each hidden unit separately


ACTIVATIONS = {
    "relu": Activation("ReLU", jax.nn.relu),
    "relu2": Activation("ReLU squared", relu2),
    "gelu": Activation("GELU", gelu),
    "gelu_tanh": Activation("GELU (tanh)", jax.nn.gelu),
    "swish": Activation("Swish", jax.nn.silu),
    "softmax": Activation("softmax", jax.nn.softmax, elementwise=False),
    "solu": Activation("SoLU", solu, norm=True, elementwise=False),
    "glu": Activation("GLU", jax.nn.sigmoid, gated=True),
    "bilinear": Activation("bilinear GLU", identity, gated=True),
    "reglu": Activation("ReGLU", jax.nn.relu, gated=True),
    "geglu": Activation("GEGLU", gelu, gated=True),
    "geglu_tanh": Activation("GEGLU (tanh)", jax.nn.gelu, gated=True),
    "swiglu": Activation("SwiGLU", jax.nn.silu, gated=True),
}
