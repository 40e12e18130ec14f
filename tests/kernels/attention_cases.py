"""Inputs of attention, and how a function's values and gradients differ from those of the plain form."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import relative_error
from xfresearch.kernels.attention import CAUSAL, Sight, attention


def draw(B=2, L=200, H=4, G=2, K=16, V=None, M=0, segments=False, seed=0, dtype="float32"):
    """((q, k, v, memory), segments of queries and keys or None), drawn from a normal distribution."""
    rng, V = np.random.default_rng(seed), V or K
    q, k, v = (rng.normal(size=(B, L, heads, size)) for heads, size in ((H, K), (G, K), (G, V)))
    memory = (rng.normal(size=(M, G, K)), rng.normal(size=(M, G, V))) if M else None
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, L)), 1), jnp.int32)
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), (q, k, v, memory))
    return arrays, (ids, ids) if segments else None


def plain(arrays, segments=None, sight: Sight = CAUSAL, **named):
    q, k, v, memory = arrays
    q_segments, k_segments = segments or (None, None)
    named |= {"q_segments_BL": q_segments, "k_segments_BS": k_segments, "sight": sight, "memory": memory}
    return attention(q, k, v, implementation="plain", **named)


def value_and_gradients(function, arrays):
    """o, and the gradients of sum(o * c) for numbers c that differ everywhere."""

    def both(arrays):
        o, vjp = jax.vjp(function, arrays)
        return o, vjp(jnp.cos(jnp.arange(o.size)).astype(o.dtype).reshape(o.shape))[0]

    return jax.jit(both)(arrays)


def error(actual, expected) -> float:
    """The largest relative error of any leaf: the output, and each input's gradient."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(relative_error(a, e) for a, e in leaves)
