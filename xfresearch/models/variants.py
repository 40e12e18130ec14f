"""The tables of variants: a name in a config, and where its code is. A new variant is one file and one line here.

Nothing is imported until a model is built, so that configs are checked without loading JAX. The layouts, which are data
and not code, stand in layouts.py.
"""

import importlib
from typing import NamedTuple

NORMS = {
    "layer": "xfresearch.models.norms:layer",
    "rms": "xfresearch.models.norms:rms",
    "scale": "xfresearch.models.norms:scale",
    "project": "xfresearch.models.norms:project",
    "dyt": "xfresearch.models.norms:dyt",
    "none": "xfresearch.models.norms:none",
}

ATTENTIONS = {
    "softmax": "xfresearch.models.attention:Attention",
    "slots": "xfresearch.models.slot_attention:SlotAttention",
    "lambda": "xfresearch.models.lambda_layer:LambdaLayer",
}


class Activation(NamedTuple):
    function: str
    gated: bool = False  # f(x W_gate) * x W_up instead of f(x W_up)
    norm: bool = False  # a LayerNorm follows
    elementwise: bool = True  # acts on each hidden unit alone


ACTIVATIONS = {
    "relu": Activation("jax.nn:relu"),
    "relu2": Activation("xfresearch.models.feed_forward:relu2"),
    "gelu": Activation("xfresearch.models.feed_forward:gelu"),
    "gelu_tanh": Activation("jax.nn:gelu"),
    "swish": Activation("jax.nn:silu"),
    "softmax": Activation("jax.nn:softmax", elementwise=False),
    "solu": Activation("xfresearch.models.feed_forward:solu", norm=True, elementwise=False),
    "glu": Activation("jax.nn:sigmoid", gated=True),
    "bilinear": Activation("xfresearch.models.feed_forward:identity", gated=True),
    "reglu": Activation("jax.nn:relu", gated=True),
    "geglu": Activation("xfresearch.models.feed_forward:gelu", gated=True),
    "geglu_tanh": Activation("jax.nn:gelu", gated=True),
    "swiglu": Activation("jax.nn:silu", gated=True),
}

FEED_FORWARDS = {
    **dict.fromkeys(ACTIVATIONS, "xfresearch.models.feed_forward:FeedForward"),
    "moe": "xfresearch.models.moe:MixtureOfExperts",
}


def load(place: str):
    """What `place`, 'module:name', names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
