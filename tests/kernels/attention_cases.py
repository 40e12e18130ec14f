"""Inputs of attention, and the error of a function's values and gradients against the `plain` kernel."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import relative_error
from xfresearch.kernels.attention import attention
from xfresearch.kernels.masks import CAUSAL, Mask, Slots


def draw(B=2, L=200, H=4, G=2, K=16, V=None, M=0, own=False, segments=False, seed=0, dtype="float32"):
    """((q, k, v, memory), (segments of queries, of keys) or None), from a normal distribution.

    own: the memory has its own queries, as under RoPE.
    """
    rng = np.random.default_rng(seed)
    V = V or K
    q, k, v = (rng.normal(size=(B, L, heads, size)) for heads, size in ((H, K), (G, K), (G, V)))
    memory = Slots(None, rng.normal(size=(M, G, K)), rng.normal(size=(M, G, V))) if M else None
    memory = memory._replace(query=rng.normal(size=(B, L, H, K))) if own else memory
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, L)), 1), jnp.int32)
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), (q, k, v, memory))
    return arrays, (ids, ids) if segments else None


def plain(arrays, segments=None, mask: Mask = CAUSAL, **named):
    q, k, v, memory = arrays
    q_segments, k_segments = segments or (None, None)
    named |= {"q_segments_BL": q_segments, "k_segments_BS": k_segments, "mask": mask}
    if memory is not None:
        named |= {"memory": (memory.key, memory.value), "memory_q_BLHK": memory.query}
    return attention(q, k, v, implementation="plain", **named)


def scaled(q_BLHK, memory, factor=None):
    """The queries, and the queries for the memory, times 1/sqrt(K) or `factor`, as the fused kernels expect them."""
    factor = q_BLHK.shape[-1] ** -0.5 if factor is None else factor
    if memory is not None and memory.query is not None:
        memory = memory._replace(query=factor * memory.query)
    return factor * q_BLHK, memory


def value_and_gradients(function, arrays):
    """o, and the gradients of sum(o * c), where all elements of c differ."""

    def both(arrays):
        o, vjp = jax.vjp(function, arrays)
        return o, vjp(jnp.cos(jnp.arange(o.size)).astype(o.dtype).reshape(o.shape))[0]

    return jax.jit(both)(arrays)


def error(actual, expected) -> float:
    """The largest relative error of any leaf: the output and each input's gradient."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(relative_error(a, e) for a, e in leaves)
