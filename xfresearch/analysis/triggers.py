"""The tokens with the largest coefficients of every key, streamed in constant memory.

For K keys the state has the t largest coefficients seen so far and the numbers of their tokens, [K, t]. A batch of T tokens
is merged in passes over its coefficients [T, K]: each pass finds the largest new coefficient of every key, until none
exceeds the smallest of its key's t. After the first batches few passes are left, because new records become rare.
"""

from functools import partial

import jax
import jax.numpy as jnp


def empty(keys: int, top: int) -> dict:
    """The state before the first token: coefficients -inf, and -1 for no token."""
    return {"values": jnp.full((keys, top), -jnp.inf, jnp.float32), "at": jnp.full((keys, top), -1, jnp.int32)}


@partial(jax.jit, donate_argnums=0)
def update(state: dict, m_TK, first):
    """The state after T more tokens, the first of which has the number `first`. Of equal coefficients the earlier stays."""
    m_TK = m_TK.astype(jnp.float32)
    keys = jnp.arange(m_TK.shape[1])

    def best(m_TK):
        at_K = m_TK.argmax(0)
        return at_K, m_TK[at_K, keys]

    def better(carry):
        state, _, (_, value_K) = carry
        return (value_K > state["values"][:, -1]).any()

    def insert(carry):
        state, m_TK, (at_K, value_K) = carry
        new = {"values": value_K, "at": first + at_K}
        is_new_K = value_K > state["values"][:, -1]
        place_K = (state["values"] >= value_K[:, None]).sum(1)  # after equal ones
        slots = jnp.arange(state["values"].shape[1])

        def inserted(old, new_K):
            shifted = jnp.roll(old, 1, 1)
            placed = jnp.where(slots < place_K[:, None], old, jnp.where(slots == place_K[:, None], new_K[:, None], shifted))
            return jnp.where(is_new_K[:, None], placed, old)

        state = {name: inserted(state[name], new[name]) for name in state}
        m_TK = m_TK.at[at_K, keys].set(-jnp.inf)
        return state, m_TK, best(m_TK)

    return jax.lax.while_loop(better, insert, (state, m_TK, best(m_TK)))[0]
