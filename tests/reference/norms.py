"""Norms, activations and the softcap of the NumPy reference: float64, written from the papers' equations."""

import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logistic(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)))(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Activations that act on each hidden unit alone. Hendrycks & Gimpel 2016 (both forms of GELU); So et al. 2021 (ReLU^2).
ELEMENTWISE = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "relu2": lambda x: np.where(x > 0, x * x, 0),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": lambda x: x * logistic(x),
}


def softcap(x, cap):
    """Gemma 2 2024, sec. 2."""
    return cap * np.tanh(x / cap) if cap else x


# Norms. Ba et al. 2016, eq. 3-4; Zhang & Sennrich 2019, eq. 4; Brody et al. 2023, eq. 3 (projection onto the subspace
# orthogonal to ones, then scaling to length sqrt(d)); Zhu et al. 2025, eq. 1; Chen et al. 2025. A missing gain is 1,
# a missing bias 0.


def layer_norm(p, x, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def rms_norm(p, x, epsilon):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + epsilon)


def project(p, x, epsilon):
    d = x.shape[-1]
    return x @ (np.eye(d) - np.ones((d, d)) / d)


KINDS = {
    "layer": layer_norm,
    "rms": rms_norm,
    "scale": rms_norm,
    "project": project,
    "dyt": lambda p, x, epsilon: np.tanh(p["alpha"] * x),
    "derf": lambda p, x, epsilon: np.vectorize(math.erf)(p["alpha"] * x + p["shift"]),
    "none": lambda p, x, epsilon: x,
}
NORMS = {
    kind: lambda p, x, epsilon, offset=0, norm=norm: (
        norm(p, x, epsilon) * (p["gain"] + offset if "gain" in p else 1) + p.get("bias", 0)
    )
    for kind, norm in KINDS.items()
}


def norm_of(kind, p, x, block):
    """Norms x with the options of `block`. p: the parameters of the norm."""
    return NORMS[kind](p, x, block.norm_epsilon, block.norm_offset)


def frozen(kind, p, block, at, x):
    """The norm as the linear map that it is at the value `at`, of x: norm(at) = frozen(at) + norm(0)."""
    if kind in ("dyt", "derf"):
        return x * (norm_of(kind, p, at, block) - norm_of(kind, p, np.zeros_like(at), block)) / at
    if kind == "none":
        return x
    centred = (lambda v: v - v.mean(-1, keepdims=True)) if kind in ("layer", "project") else (lambda v: v)
    size = 1.0 if kind == "project" else np.sqrt((centred(at) ** 2).mean(-1, keepdims=True) + block.norm_epsilon)
    return centred(x) / size * (p["gain"] + block.norm_offset if "gain" in p else 1)
