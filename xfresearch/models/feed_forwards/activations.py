"""Activations of feed-forward layers. Their names are values of `feed_forward.kind`; ACTIVATIONS has their formulas."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.models.recompute import recomputed


def identity(x):
    return x


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


LIMIT = 7.0  # of clamped SwiGLU: `swiglu_limit` in gpt-oss


def clamped_swish(x):
    """The gate of gpt-oss. 1.702 makes it nearly GELU."""
    z = jnp.minimum(x, LIMIT)
    return z * jax.nn.sigmoid(1.702 * z)


def clamped_plus_one(x):
    """The multiplier of gpt-oss."""
    return jnp.clip(x, -LIMIT, LIMIT) + 1


class Activation(NamedTuple):
    title: str  # its name in text for people
    function: Callable
    formula: str  # of z = x W_up + b; if gated, of z = x W_gate + b and u = x W_up + b'
    paper: str
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


SHAZEER = "Shazeer 2020"
ACTIVATIONS = {
    "relu": Activation("ReLU", jax.nn.relu, "max(z, 0)", "Vaswani et al. 2017"),
    "relu2": Activation("ReLU squared", lambda x: jnp.square(jax.nn.relu(x)), "max(z, 0)^2", "So et al. 2021"),
    "gelu": Activation("GELU", gelu, "z P(N(0, 1) < z)", "Hendrycks & Gimpel 2016"),
    "gelu_tanh": Activation(
        "GELU (tanh)", jax.nn.gelu, "z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2", "Hendrycks & Gimpel 2016"
    ),
    "swish": Activation("Swish", jax.nn.silu, "z sigmoid(z)", "Ramachandran et al. 2017"),
    "softmax": Activation("softmax", jax.nn.softmax, "softmax(z) over the hidden units", "", elementwise=False),
    "solu": Activation(
        "SoLU",
        lambda x: x * jax.nn.softmax(x),
        "LayerNorm(z softmax(z)) over the hidden units",
        "Elhage et al. 2022",
        norm=True,
        elementwise=False,
    ),
    "glu": Activation("GLU", jax.nn.sigmoid, "sigmoid(z) u", SHAZEER, gated=True),
    "bilinear": Activation("bilinear GLU", identity, "z u", SHAZEER, gated=True),
    "reglu": Activation("ReGLU", jax.nn.relu, "max(z, 0) u", SHAZEER, gated=True),
    "geglu": Activation("GEGLU", gelu, "gelu(z) u", SHAZEER, gated=True),
    "geglu_tanh": Activation("GEGLU (tanh)", jax.nn.gelu, "gelu_tanh(z) u", SHAZEER, gated=True),
    "swiglu_clamped": Activation(
        "clamped SwiGLU",
        clamped_swish,
        "z sigmoid(1.702 z) (u + 1), z at most 7 and u in [-7, 7]",
        "gpt-oss, OpenAI 2025",
        gated=True,
        multiplier=clamped_plus_one,
    ),
    "swiglu": Activation("SwiGLU", jax.nn.silu, "z sigmoid(z) u", SHAZEER, gated=True),
}
