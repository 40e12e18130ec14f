"""Trims adaptive spans after training: a head does not need tokens at which its mask is 0. As in the code of Sukhbaatar
et al. 2019a, a layer computes only its widest span, rounded up to a multiple of 64."""

import math
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from xfresearch.models.mixers.softmax.config import SoftmaxConfig, longest

MULTIPLE = 64


def reach(a, max_length: int, stacks: Iterable[Mapping]) -> int:
    """The number of past tokens that trained spans need in the layers of a block; 0 if they need the whole window. The
    widest head of these layers decides. `stacks` are the stacked parameters of their attention. Not for training, where
    spans may grow."""
    if not isinstance(a, SoftmaxConfig) or a.span != "adaptive":
        return 0
    widest = max(float(jnp.max(stack["span"]["fraction"])) for stack in stacks)
    # m(x) > 0 for x < z S + R steps back, where the nearest token has x = 0.
    steps = math.ceil(widest * longest(a, max_length) + a.span_ramp)
    width = -(-steps // MULTIPLE) * MULTIPLE
    return width if width < longest(a, max_length) else 0
