"""Soft-capping of logits: y = c tanh(x / c), which stays within (-c, c) and is x where x is small (Gemma 2 2024, sec. 2)."""

import jax.numpy as jnp


def softcapped(x, cap: float):
    """x itself where the cap c is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def softcap_slope(y, cap: float):
    """dy/dx, from y = softcapped(x, cap)."""
    return 1 - jnp.square(y / cap) if cap else 1.0
