"""The dense feed-forward layers of the NumPy reference. Vaswani et al. 2017, eq. 2; Shazeer 2020, eq. 6; Elhage et al.
2022 (SoLU, followed by a LayerNorm).

Float64, written from the papers' equations and not from our code. `p` holds the parameters of one layer. Each function
takes one sequence.
"""

import numpy as np

from tests import variants
from tests.reference.records import record


def feed_forward(up, gate, down, kind, x, biases=(0, 0, 0), norm=None, record=record):
    activation = variants.ACTIVATIONS[kind]
    if activation.gated:
        z = record("pre_activation", x @ gate + biases[1])
        h = record("hidden", activation.reference(z) * activation.multiplier(record("multiplier", x @ up + biases[0])))
        return record("coefficients", h) @ down + biases[2]
    z = record("pre_activation", x @ up + biases[0])
    h = record("hidden", activation.reference(z))
    if norm:  # SoLU without its denominator: a factor per token, which the norm cancels
        h = norm(z * np.exp(z - z.max(-1, keepdims=True)))
    return record("coefficients", h) @ down + biases[2]


def hidden_norm(p, h, epsilon):
    return variants.NORMS["layer"].reference({}, h, epsilon) * p.get("gain", 1) + p.get("bias", 0)


def dense(p, x_LD, kind, epsilon=0.0):
    kernels, biases = ([p.get(name, {}).get(part, 0) for name in ("up", "gate", "down")] for part in ("kernel", "bias"))
    norm = (lambda h: hidden_norm(p["hidden_norm"], h, epsilon)) if kind == "solu" else None
    return feed_forward(*kernels, kind, x_LD, biases, norm)
