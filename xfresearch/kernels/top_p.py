"""The tokens that nucleus sampling (Holtzman et al. 2020) keeps, without sorting the vocabulary.

A token is kept if the likelier tokens together have a probability below top_p. So all kept logits lie at or above a
threshold. Floating-point numbers have the same order as integers made of their sign and bits, so the bits of the threshold
can be searched one after the other, the highest first: each costs one pass over the probabilities. On 2 cores of a CPU, 16
rows of 50,257 take 5 ms, and sorting them takes 190.
"""

import jax
import jax.numpy as jnp

LANES = 128  # sums are of this many columns side by side: XLA on CPU adds a single one number by number


def kept_by_top_p(logits_BV, top_p: float):
    """Whether each token is kept [B, V]: the smallest set of the likeliest tokens whose probabilities sum to top_p, and all
    tokens that are as likely as the last one of the set. The likeliest is always kept, even if top_p rounds to 0."""
    order_BV = _ordered(logits_BV)
    p_BV = jax.nn.softmax(logits_BV, -1)
    integer = jnp.iinfo(order_BV.dtype)
    order_BNC, p_BNC = _in_lanes(order_BV, integer.min), _in_lanes(p_BV, 0)

    def step(i, threshold_B):
        """Sets bit `i`, from the highest on, if the tokens at or above the new threshold still have top_p together."""
        higher_B = threshold_B + jnp.left_shift(jnp.ones_like(threshold_B), integer.bits - 1 - i)
        mass_B = jnp.where(order_BNC >= higher_B[:, None, None], p_BNC, 0).sum(1).sum(-1)
        return jnp.where(mass_B >= top_p, higher_B, threshold_B)

    lowest_B = jnp.full(len(logits_BV), integer.min, order_BV.dtype)
    threshold_B = jax.lax.fori_loop(0, integer.bits, step, lowest_B)
    return order_BV >= jnp.minimum(threshold_B, order_BV.max(-1))[:, None]


def _ordered(x):
    """Integers in the order of the floating-point numbers x: minus the bits without the sign for a negative one."""
    integers = jax.lax.bitcast_convert_type(x, f"int{jnp.finfo(x.dtype).bits}")
    return jnp.where(integers < 0, jnp.iinfo(integers.dtype).min - integers, integers)


def _in_lanes(x_BV, padding):
    """[B, N, LANES], padded."""
    B, V = x_BV.shape
    return jnp.pad(x_BV, ((0, 0), (0, -V % LANES)), constant_values=padding).reshape(B, -1, LANES)
