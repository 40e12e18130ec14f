"""The tokens with the largest coefficients of every key, streamed in constant memory.

For K keys the state has the t largest coefficients seen so far and the numbers of their tokens, [K, t]. The t largest of a
batch are merged into it.
"""

from functools import partial

import jax
import jax.numpy as jnp


def empty(keys: int, top: int, dtype=jnp.float32) -> dict:
    """The state before the first token: coefficients -inf, and -1 for no token."""
    return {"values": jnp.full((keys, top), -jnp.inf, dtype), "at": jnp.full((keys, top), -1, jnp.int32)}


@partial(jax.jit, donate_argnums=0)
def update(state: dict, m_TK, first):
    """The state after T more tokens, the first of which has the number `first`. Of equal coefficients the earlier stays."""
    top = state["values"].shape[1]
    m_TK = m_TK.astype(state["values"].dtype)
    m_KT = jnp.where(m_TK == 0, 0, m_TK).T  # top_k puts -0.0, which a gate may give, behind 0.0
    values_KT, at_KT = jax.lax.top_k(m_KT, min(top, len(m_TK)))
    values_KT = jnp.concatenate([state["values"], values_KT], 1)
    at_KT = jnp.concatenate([state["at"], first + at_KT], 1)
    best_KT, chosen_KT = jax.lax.top_k(values_KT, top)
    return {"values": best_KT, "at": jnp.take_along_axis(at_KT, chosen_KT, 1)}
