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


LIMIT = 7.0  # of clamped SwiGLU: `swiglu_limit` in gpt-oss


def clamped_swish(x):
    """z sigmoid(1.702 z) with z = min(x, 7): the gate of gpt-oss (OpenAI 2025, its code). 1.702 makes it nearly GELU."""
    z = jnp.minimum(x, LIMIT)
    return z * jax.nn.sigmoid(1.702 * z)


def clamped_plus_one(x):
    """x + 1, with x limited to [-7, 7]: the multiplier of gpt-oss."""
    return jnp.clip(x, -LIMIT, LIMIT) + 1


class Activation(NamedTuple):
    title: str  # its name in text for people
    function: Callable
    gated: bool = False  # f(x W_gate) * m(x W_up) instead of f(x W_up)
    multiplier: Callable = identity  # m
    norm: bool = False  # a LayerNorm follows
    elementwise: bool = True  # it acts on each hidden unit separately

    def __call__(self, pre, multiplier=None):
        """f(pre), times m(multiplier) if there is one."""
        h = self.function(pre)
        return h if multiplier is None else h * self.multiplier(multiplier)

    def recomputed(self, pre, multiplier=None, *, gates=None):
        """self(pre, multiplier), times the gates [..., 1] if there are any; the backward pass keeps only the arguments."""

        return recomputed(lambda pre, multiplier, gates: times(self(pre, multiplier), gates), pre, multiplier, gates)


def times(h, gates=None):
    """h * gates; h without gates."""
    return h if gates is None else h * gates


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
    "swiglu_clamped": Activation("clamped SwiGLU", clamped_swish, gated=True, multiplier=clamped_plus_one),
    "swiglu": Activation("SwiGLU", jax.nn.silu, gated=True),
}
