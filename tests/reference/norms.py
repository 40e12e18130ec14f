"""Norms, the softmax and the softcap of the NumPy reference: float64, written from the papers' equations."""

import numpy as np

from tests import variants


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logistic(x):
    return 1 / (1 + np.exp(-x))


def softcap(x, cap):
    """Gemma 2 2024, sec. 2."""
    return cap * np.tanh(x / cap) if cap else x


def norm_of(kind, p, x, block):
    """Norms x with the options of `block`. p: the parameters of the norm. A missing gain is 1, a missing bias 0."""
    normed = variants.NORMS[kind].reference(p, x, block.norm_epsilon)
    return normed * (p["gain"] + block.norm_offset if "gain" in p else 1) + p.get("bias", 0)


def frozen(kind, p, block, at, x):
    """The norm as the linear map that it is at the value `at`, of x: norm(at) = frozen(at) + norm(0)."""
    if kind in ("dyt", "derf"):
        return x * (norm_of(kind, p, at, block) - norm_of(kind, p, np.zeros_like(at), block)) / at
    if kind == "none":
        return x
    centred = (lambda v: v - v.mean(-1, keepdims=True)) if kind in ("layer", "project") else (lambda v: v)
    size = 1.0 if kind == "project" else np.sqrt((centred(at) ** 2).mean(-1, keepdims=True) + block.norm_epsilon)
    return centred(x) / size * (p["gain"] + block.norm_offset if "gain" in p else 1)
