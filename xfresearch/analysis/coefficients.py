"""The coefficients of every memory of a model: the units of feed-forward layers and of experts, and persistent slots.

A sublayer writes sum_i m_i v_i, with coefficients m_i of its K values v_i (models/memories.py). An expert's coefficients
count for the tokens that chose it; its output is multiplied by the token's gate.
"""

import jax
import jax.numpy as jnp

from xfresearch.models.inputs import tap_shapes
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayers import Sublayer
from xfresearch.models.taps import in_stack, of_encoder

SITES = ("coefficients", "chosen", "gates", "dropped")


def memory_names(model: ModelConfig) -> tuple[str, ...]:
    """The memories of a model by name: 'blocks.0.feed_forward', 'blocks.0.feed_forward.shared', 'blocks.0.attention', and
    first those of an encoder, 'encoder.blocks.0.feed_forward'."""
    return tuple(
        f"{each.path}.{part}" if part else each.path
        for each in model.sublayers(has="memory_parts")
        for part in each.options.memory_parts
    )


def sublayer_of(model: ModelConfig, memory: str) -> Sublayer:
    """The sublayer that writes the values of a memory."""
    return next(each for each in model.sublayers() if each.path == written_by(memory))


def sites(model: ModelConfig, memory: str) -> list[str]:
    """The taps that `of_keys` reads."""
    return [f"{memory}.{site}" for site in SITES if f"{memory}.{site}" in tap_shapes(model)]


def of_keys(model: ModelConfig, memory: str, values: dict, gated: bool = False) -> jax.Array:
    """[B, L, K]: the coefficients of all K keys of a memory, in the order of models.memory(...).writes, from the values of
    `sites`. Those of experts that a token did not choose, or that had no room for it, are 0. gated: times the gate of the
    expert."""
    m = values[f"{memory}.coefficients"]
    if f"{memory}.chosen" in values:  # [B, L, k, F] of the k chosen experts
        m = m * values[f"{memory}.gates"][..., None].astype(m.dtype) if gated else m
        if f"{memory}.dropped" in values:  # an expert without room has not seen the token
            m = jnp.where(values[f"{memory}.dropped"][..., None], 0, m)
        experts = sublayer_of(model, memory).options.mixture.experts
        m = jnp.einsum("blke,blkf->blef", jax.nn.one_hot(values[f"{memory}.chosen"], experts, dtype=m.dtype), m)
    elif m.ndim == 4:  # [B, H, L, M] of slots, without the sink, which is the last
        m = m[..., : sublayer_of(model, memory).options.slots].transpose(0, 2, 1, 3)
    return m.reshape(*m.shape[:2], -1)


def where(memory: str) -> tuple[int, str]:
    """The layer and the sublayer of a memory in its stack: (0, 'feed_forward.shared')."""
    _, layer, sublayer = in_stack(memory).split(".", 2)
    return int(layer), sublayer


def written_by(memory: str) -> str:
    """The path of the sublayer that writes a memory's values: 'blocks.0.feed_forward' for that of its shared experts."""
    return ".".join(memory.split(".")[: 4 if of_encoder(memory) else 3])
