"""Softcap of logits: y = c tanh(x / c) stays within (-c, c) and is close to x for small x (Gemma 2 2024, sec. 2)."""

import jax.numpy as jnp


def softcapped(x, cap: float):
    """Applies the softcap c = `cap` to x; 0 is none."""
    return cap * jnp.tanh(x / cap) if cap else x


def softcap_slope(y, cap: float):
    """dy/dx, computed from y = softcapped(x, cap)."""
    return 1 - jnp.square(y / cap) if cap else 1.0
