"""Trimming of adaptive spans: once trained, a head looks no further back than its mask is above 0. As in the code of
Sukhbaatar et al. 2019a, the widest span of a layer, rounded up to a multiple of 64, bounds what the layer computes."""

import math
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from xfresearch.models.mixers.softmax.config import SoftmaxConfig, longest

MULTIPLE = 64


def reach(a, max_length: int, stacks: Iterable[Mapping]) -> int:
    """Tokens back that trained spans need in the layers of one block, whose stacked parameters of attention are `stacks`;
    0 where they need all of the window. It is the widest head of these layers that decides. Not for training, where spans
    may grow."""
    if not isinstance(a, SoftmaxConfig) or a.span != "adaptive":
        return 0
    widest = max(float(jnp.max(stack["span"]["fraction"])) for stack in stacks)
    # m(x) > 0 where x < z S + R: that many steps back, the nearest token being 0.
    steps = math.ceil(widest * longest(a, max_length) + a.span_ramp)
    width = -(-steps // MULTIPLE) * MULTIPLE
    return width if width < longest(a, max_length) else 0
