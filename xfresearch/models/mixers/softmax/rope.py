"""RoPE: rotates queries and keys by their positions (Su et al. 2021). It can be scaled for longer contexts."""

import math

import jax.numpy as jnp
import numpy as np

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models.mixers.softmax.config import rotary_size
from xfresearch.models.mixers.softmax.options import RopeConfig


def rope_frequencies(rope: RopeConfig, size: int) -> np.ndarray:
    """Radians per token of each of the `size`/2 pairs of dimensions, float64: theta^(-2i/size), then scaled.

    linear: all are divided by `factor` (Chen et al. 2023).
    llama3: divided if the original context has fewer than low_frequency rotations, unchanged if it has more than
        high_frequency, interpolated between (Llama 3.1's code).
    yarn: the same, but interpolated linearly over the dimensions between (the code of Peng et al. 2023; their sec. 3.2
        interpolates over rotations).
    """
    frequencies = rope.theta ** (-np.arange(0, size, 2) / size)
    if rope.scaling == "none":
        return frequencies
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "yarn":
        kept = _unscaled_by_yarn(rope, size)
    else:
        rotations = rope.original_length * frequencies / (2 * math.pi)
        kept = np.clip((rotations - rope.low_frequency) / (rope.high_frequency - rope.low_frequency), 0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _unscaled_by_yarn(rope: RopeConfig, size: int) -> np.ndarray:
    """The share of each frequency that is not scaled. As in the authors' code and in transformers, the end of the
    interpolation is limited by `size`, not by the number of frequencies `size`/2. With `truncate`, it starts and ends at
    whole dimensions."""

    def dimension(rotations: float) -> float:
        return size * math.log(rope.original_length / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high_frequency), dimension(rope.low_frequency)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return 1 - np.clip((np.arange(size // 2) - first) / (last - first or 0.001), 0, 1)


def attention_factor(rope: RopeConfig) -> float:
    """Factor of the rotated dimensions of queries and keys: YaRN's sqrt(1/t) (Peng et al. 2023, sec. 3.4), else 1."""
    return (rope.attention_factor or 0.1 * math.log(rope.factor) + 1) if rope.scaling == "yarn" else 1.0


def rotate(x_BLHK, positions_BL, rope: RopeConfig):
    """Rotates dimension i with dimension i + k/2 by position * frequency_i, in the first k = fraction * K dimensions
    (Su et al. 2021; halves as in GPT-NeoX), and multiplies them by `attention_factor`. Angles and products are float32
    or wider; the result has the dtype of x."""
    size = rotary_size(x_BLHK.shape[-1], rope.fraction)
    wide = wide_dtype(x_BLHK)
    frequencies = jnp.asarray(rope_frequencies(rope, size), wide)
    angles_BL1k = (positions_BL[..., None].astype(wide) * frequencies)[:, :, None, :]
    gain = attention_factor(rope)
    sin, cos = gain * jnp.sin(angles_BL1k), gain * jnp.cos(angles_BL1k)
    rotated, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    a, b = jnp.split(rotated.astype(wide), 2, -1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHK.dtype)
    return jnp.concatenate([rotated, rest], -1) if rest.shape[-1] else rotated
