"""Norms. Ba et al. 2016, eq. 3-4; Zhang & Sennrich 2019, eq. 4; Brody et al. 2023, eq. 3 (projection onto the subspace
orthogonal to ones, then scaling to length sqrt(d)); Zhu et al. 2025, eq. 1; Chen et al. 2025."""

import math

import numpy as np

from tests.variants.case import NormCase, Parameter


def layer_norm(p, x, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)


def rms_norm(p, x, epsilon):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + epsilon)


def project(p, x, epsilon):
    d = x.shape[-1]
    return x @ (np.eye(d) - np.ones((d, d)) / d)


ALPHA = Parameter(lambda shape, model, block: block.norm_alpha)
CASES = [
    NormCase("layer", layer_norm),
    NormCase("rms", rms_norm),
    NormCase("scale", rms_norm),
    NormCase("project", project),
    NormCase("dyt", lambda p, x, epsilon: np.tanh(p["alpha"] * x), parameters={"alpha": ALPHA}),
    NormCase(
        "derf",
        lambda p, x, epsilon: np.vectorize(math.erf)(p["alpha"] * x + p["shift"]),
        parameters={"alpha": ALPHA, "shift": Parameter(0.0)},
    ),
    NormCase("none", lambda p, x, epsilon: x),
]
