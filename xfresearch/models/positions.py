"""Position information: added to the embedding (learned, sinusoidal) or rotated into queries and keys (RoPE)."""

import jax.numpy as jnp


def sinusoidal(positions_BL, width: int):
    """Sines on even and cosines on odd dimensions, wavelengths 2 pi to 10000 * 2 pi (Vaswani et al. 2017, sec. 3.5).

    Returns float32 [B, L, width], or float64 where JAX runs with 64 bits.
    """
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = positions_BL[..., None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions_BL.shape, -1)[..., :width]


def rope(x_BLHK, positions_BL, theta: float):
    """Rotates dimension i with dimension i + K/2 by position * theta^(-2i/K) (Su et al. 2021; halves as in GPT-NeoX).

    Angles and products are float32 or wider; the result has x's dtype.
    """
    half = x_BLHK.shape[-1] // 2
    wide = jnp.promote_types(x_BLHK.dtype, jnp.float32)
    frequencies = theta ** (-jnp.arange(half, dtype=wide) / half)
    angles_BL1k = (positions_BL[..., None].astype(wide) * frequencies)[:, :, None, :]
    sin, cos = jnp.sin(angles_BL1k), jnp.cos(angles_BL1k)
    a, b = jnp.split(x_BLHK.astype(wide), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHK.dtype)
