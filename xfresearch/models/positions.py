"""Position information: added to the embedding (learned, sinusoidal), rotated into queries and keys (RoPE), or added to the
logits by distance (ALiBi, T5's buckets, the relative key of All-attention).

Distances are of query minus key, d = l - s >= 0 for a causal model.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xfresearch.config import ModelConfig, RopeConfig
from xfresearch.models import costs as c
from xfresearch.models.sizes import head_sizes, longest, rotary_size


def sinusoidal(positions_BL, width: int):
    """Sines on even and cosines on odd dimensions, wavelengths 2 pi to 10000 * 2 pi (Vaswani et al. 2017, sec. 3.5).

    Returns float32 [B, L, width], or float64 where JAX runs with 64 bits.
    """
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = positions_BL[..., None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions_BL.shape, -1)[..., :width]


def rope_frequencies(rope: RopeConfig, size: int) -> np.ndarray:
    """Radians per token of each of the `size`/2 pairs of dimensions, float64: theta^(-2i/size), then stretched.

    linear: all divided by `factor` (Chen et al. 2023). llama3: divided where the original context holds less than
    low_frequency turns, kept where it holds more than high_frequency, blended between (Llama 3.1's code). yarn: likewise,
    but blended evenly over the dimensions between (the code of Peng et al. 2023; their sec. 3.2 blends by turns).
    """
    frequencies = rope.theta ** (-np.arange(0, size, 2) / size)
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "yarn":
        kept = _kept_by_yarn(rope, size)
    else:
        turns = rope.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency), 0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _kept_by_yarn(rope: RopeConfig, size: int) -> np.ndarray:
    """The share of each frequency that is not stretched. As in the authors' code and in transformers, the blend's ends are
    whole dimensions, and the last one is bounded by `size`, not by the `size`/2 frequencies that there are."""

    def dimension(turns: float) -> float:
        return size * math.log(rope.original_length / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first = max(math.floor(dimension(rope.high_frequency)), 0)
    last = min(math.ceil(dimension(rope.low_frequency)), size - 1)
    return 1 - np.clip((np.arange(size // 2) - first) / (last - first or 0.001), 0, 1)


def attention_factor(rope: RopeConfig) -> float:
    """Factor of queries and keys where they are rotated: YaRN's sqrt(1/t) (Peng et al. 2023, sec. 3.4), otherwise 1."""
    return (rope.attention_factor or 0.1 * math.log(rope.factor) + 1) if rope.scaling == "yarn" else 1.0


def rotate(x_BLHK, positions_BL, rope: RopeConfig):
    """Rotates dimension i with dimension i + k/2 by position * frequency_i, of the first k = fraction * K dimensions
    (Su et al. 2021; halves as in GPT-NeoX), and multiplies them by `attention_factor`. Angles and products are float32 or
    wider; the result has x's dtype."""
    size = rotary_size(x_BLHK.shape[-1], rope.fraction)
    wide = jnp.promote_types(x_BLHK.dtype, jnp.float32)
    frequencies = jnp.asarray(rope_frequencies(rope, size), wide)
    angles_BL1k = (positions_BL[..., None].astype(wide) * frequencies)[:, :, None, :]
    gain = attention_factor(rope)
    sin, cos = gain * jnp.sin(angles_BL1k), gain * jnp.cos(angles_BL1k)
    turned, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    a, b = jnp.split(turned.astype(wide), 2, -1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHK.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned


def alibi_slopes(heads: int) -> np.ndarray:
    """2^(-8 h / H) for h = 1 .. H; where H is not a power of two, those of the power below and every second one of the
    power above (Press et al. 2022, sec. 3, and their code)."""
    power = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between])[:heads]


def t5_bucket(distance, buckets: int, farthest: int):
    """Bucket of each distance >= 0: one each below buckets/2, then logarithmic, the last from `farthest` on
    (Raffel et al. 2020, sec. 2.1; the causal form of their code). Negative distances fall into bucket 0."""
    exact, distance = buckets // 2, jnp.maximum(distance, 0)
    # Through a table in float64: in float32 some distances fall on the other side of a bucket's edge.
    table = np.arange(farthest + 1)
    share = np.log(np.maximum(table, 1) / exact) / math.log(farthest / exact)
    far = np.minimum(exact + (share * (buckets - exact)).astype(int), buckets - 1)
    return jnp.asarray(np.where(table < exact, table, far))[jnp.minimum(distance, farthest)]


class SharedPositions(nnx.Module):
    """Tables that all layers share: T5's biases [buckets, H], and the relative key [distances, K] of All-attention, one
    for all heads and layers (Sukhbaatar et al. 2019, code: `key_pe`, drawn from N(0, 1))."""

    def __init__(self, model: ModelConfig, rngs):
        dtype, shapes = jnp.dtype(model.param_dtype), _shapes(model)
        key, bias = shapes.get("relative_key"), shapes.get("t5")
        self.relative_key = nnx.Param(jax.random.normal(rngs.params(), key, dtype)) if key else None
        self.relative_bias = nnx.Param(jnp.zeros(bias, dtype)) if bias else None

    def into(self, ctx):
        """`ctx` with the tables in it."""
        return replace(
            ctx,
            relative_key_RK=None if self.relative_key is None else self.relative_key[...],
            relative_bias_RH=None if self.relative_bias is None else self.relative_bias[...],
        )

    @staticmethod
    def costs(model: ModelConfig) -> c.Costs:
        return c.weights(sum(math.prod(shape) for shape in _shapes(model).values()))


def _shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    shapes = {}
    for block in model.blocks.values():
        a = block.attention
        if a.position == "relative_key":
            rows = max(longest(a, model), shapes.get("relative_key", (0, 0))[0])
            shapes["relative_key"] = (rows, head_sizes(a, model.width).qk)
        if a.position == "t5":
            shapes["t5"] = (a.t5_buckets, a.heads)
    return shapes
