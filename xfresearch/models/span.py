"""Trimming of adaptive spans: once trained, a head looks no further back than its mask is above 0. As in the code of
Sukhbaatar et al. 2019a, the widest span of a layer, rounded up to a multiple of 64, bounds what the layer computes."""

import math
from dataclasses import replace

import jax.numpy as jnp

from xfresearch.config import ModelConfig
from xfresearch.models.sizes import longest
from xfresearch.models.transformer import stack_names

MULTIPLE = 64


def trim(model: ModelConfig, params: dict) -> ModelConfig:
    """`model` with attention windows as wide as the spans in `params` need: the same function, less to compute.

    Layers of one block share its width, that of the widest head among them. Not for training: spans may grow there.
    """
    blocks = dict(model.blocks)
    for name, block in blocks.items():
        a = block.attention
        if a.kind != "softmax" or a.span != "adaptive":
            continue
        stacks = [stack for stack, of in zip(stack_names(model), model.pattern, strict=True) if of == name]
        widest = max(float(jnp.max(params["blocks"][stack]["attention"]["span"]["fraction"])) for stack in stacks)
        # m(x) > 0 where x < z S + R: that many steps back, the nearest token being 0.
        steps = math.ceil(widest * longest(a, model) + a.span_ramp)
        width = -(-steps // MULTIPLE) * MULTIPLE
        if width < longest(a, model):
            blocks[name] = replace(block, attention=replace(a, trimmed=width))
    return replace(model, blocks=blocks)
