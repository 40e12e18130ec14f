"""Sinusoidal position embeddings."""

import jax.numpy as jnp


def sinusoidal(positions_BL, width: int):
    """Sines on even and cosines on odd dimensions, wavelengths 2 pi to 10000 * 2 pi (Vaswani et al. 2017, sec. 3.5).

    Returns float32 [B, L, width], or float64 if JAX runs with 64 bits.
    """
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = positions_BL[..., None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions_BL.shape, -1)[..., :width]
