"""Activations of dense feed-forward layers, and their options. Hendrycks & Gimpel 2016 (both forms of GELU); Shazeer 2020;
So et al. 2021 (ReLU^2); Elhage et al. 2022 (SoLU, followed by a LayerNorm)."""

import math

import numpy as np

from tests.reference.norms import logistic, softmax
from tests.variants.case import ActivationCase, Parameter
from tests.variants.parameters import DOWN, MEAN, UP, biases


def relu(x):
    return np.where(x > 0, x, 0)


def gelu(x):
    return x * np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)))(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swish(x):
    return x * logistic(x)


DENSE = "block/feed_forward/"
PLAIN = {f"{DENSE}up/kernel": UP, f"{DENSE}down/kernel": DOWN, **biases(f"{DENSE}up", f"{DENSE}down")}
GATED = {f"{DENSE}{name}/kernel": DOWN if name == "down" else UP for name in ("up", "gate", "down")}
HIDDEN_NORM = {f"{DENSE}hidden_norm/gain": Parameter(1.0), f"{DENSE}hidden_norm/bias": Parameter(0.0)}


def plain(name, reference, **more) -> ActivationCase:
    return ActivationCase(name, reference, **{"parameters": PLAIN, **more})


def gated(name, reference, **more) -> ActivationCase:
    """`reference` acts on the gate."""
    return ActivationCase(name, reference, gated=True, parameters=GATED, **more)


CASES = [
    plain("relu", relu),
    plain("relu2", lambda x: relu(x) ** 2),
    plain(
        "gelu",
        gelu,
        values={"feed_forward.hidden": "size", "feed_forward.hidden_factor": [1.5]},
        needs_of={"feed_forward.hidden_factor": {"feed_forward.hidden": 0}},
    ),
    plain("gelu_tanh", gelu_tanh),
    plain("swish", swish),
    # The rows of W_down have length sqrt(D), like the values of memory slots.
    plain("softmax", softmax, down_scale=lambda hidden: hidden**0.5, writes={"feed_forward.kind=softmax": MEAN}),
    plain("solu", lambda x: x * softmax(x), parameters=PLAIN | HIDDEN_NORM),
    gated("glu", logistic),
    gated("bilinear", lambda x: x),
    gated("reglu", relu),
    gated("geglu", gelu),
    gated("geglu_tanh", gelu_tanh),
    gated(
        "swiglu",
        swish,
        needs_of={"feed_forward.gated_hidden": {"feed_forward.hidden": 0, "feed_forward.hidden_factor": 3.0}},
    ),
    gated(  # gpt-oss, OpenAI 2025, its code
        "swiglu_clamped",
        lambda x: np.minimum(x, 7) * logistic(1.702 * np.minimum(x, 7)),
        multiplier=lambda x: np.clip(x, -7, 7) + 1,
    ),
]
