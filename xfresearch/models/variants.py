"""The tables of variants: a name in a config, and where its code is. A new variant is one file and one line here.

Nothing is imported until a model is built, so that configs are checked without loading JAX. The layouts, which are data
and not code, stand in layouts.py.
"""

import importlib
from typing import NamedTuple

NORMS = {
    "layer": "xfresearch.models.norms:layer",
    "rms": "xfresearch.models.norms:rms",
    "none": "xfresearch.models.norms:none",
}

ATTENTIONS = {
    "softmax": "xfresearch.models.attention:Attention",
    "lambda": "xfresearch.models.lambda_layer:LambdaLayer",
}


class Activation(NamedTuple):
    function: str
    gated: bool


ACTIVATIONS = {
    "relu": Activation("jax.nn:relu", gated=False),
    "gelu": Activation("xfresearch.models.feed_forward:gelu", gated=False),
    "gelu_tanh": Activation("jax.nn:gelu", gated=False),
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
