"""Attention over several sets of keys under one softmax: each set has a kernel, and the results are merged.

A kernel computes attention to its set alone: the output o_i, and lse_i, the logarithm of the sum of exp(logits). The
output over all sets is (Liu et al. 2023, Ring Attention, sec. 3)

    lse = log sum_i exp(lse_i)        o = sum_i exp(lse_i - lse) o_i

Automatic differentiation of these two equations would be wrong, because libraries return lse_i without a gradient. So the
backward pass is written here. The gradients of one set of keys are

    p = exp(logits - lse)      d = sum(do * o)      dlogits = p (do v^T - d)
    dq = dlogits k             dk = dlogits^T q     dv = p^T do

A kernel's own backward pass computes exactly these, if it receives the o and lse of all sets in place of its o_i and lse_i.
The gradient of the queries is the sum of dq over the sets.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import Slots


class Part(NamedTuple):
    """Attention to one set of keys. `constants` are inputs without a gradient: segments, masks."""

    forward: Callable  # (q_BLHK, k, v, constants) -> o_BLHV, lse_BHL in float32 or wider
    backward: Callable  # (q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV) -> dq, dk, dv


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def merged(parts: tuple[Part, ...], queries: tuple, keys_values: tuple, constants: tuple):
    """o_BLHV of all parts together: parts[i] has queries[i], keys_values[i] and constants[i].

    The queries of parts differ if, for example, RoPE rotates those for tokens and not those for slots.
    """
    return _forward(parts, queries, keys_values, constants)[0]


def _forward(parts, queries, keys_values, constants):
    calls = zip(parts, queries, keys_values, constants, strict=True)
    o, lse = merge([part.forward(q_BLHK, *kv, c) for part, q_BLHK, kv, c in calls])
    o = o.astype(queries[0].dtype)
    return o, (queries, keys_values, constants, o, lse)


def _backward(parts, residuals, do_BLHV):
    queries, keys_values, constants, o, lse = residuals
    dqs = []
    gradients = []
    for part, q_BLHK, kv, c in zip(parts, queries, keys_values, constants, strict=True):
        dq, *rest = part.backward(q_BLHK, *kv, c, o, lse, do_BLHV)
        dqs.append(dq.astype(q_BLHK.dtype))
        gradients.append(tuple(d.astype(x.dtype) for d, x in zip(rest, kv, strict=True)))
    return tuple(dqs), tuple(gradients), None


merged.defvjp(_forward, _backward)


def with_slots(tokens: tuple, q_BLHK, memory: Slots | None, slots: tuple | None):
    """o_BLHV of attention to tokens and to the slots `memory`, if any.

    tokens, slots: (part, its keys and values, its constants); slots is None without memory.
    """
    queries = (q_BLHK,) if memory is None else (q_BLHK, memory.queries(q_BLHK))
    parts, keys_values, constants = zip(*([tokens] if slots is None else [tokens, slots]), strict=True)
    return merged(parts, queries, keys_values, constants)


def merge(parts: list):
    """(o_BLHV, lse_BHL) of the whole, in float32 or wider, from the (o, lse) of the parts."""
    lse_BHL = jax.nn.logsumexp(jnp.stack([lse for _, lse in parts]), 0)
    o_BLHV = sum(jnp.exp(lse - lse_BHL).swapaxes(1, 2)[..., None] * o for o, lse in parts)
    return o_BLHV, lse_BHL


def sink_part() -> Part:
    """Attention to a sink: a key with the logit b_H for every query, and a value of zeros. Its only array is b_H."""

    def forward(q_BLHK, sink_H, constants):
        B, L, H, _ = q_BLHK.shape
        wide = wide_dtype(q_BLHK)
        return jnp.zeros((B, L, H, 1), wide), jnp.broadcast_to(sink_H.astype(wide)[:, None], (B, H, L))

    def backward(q_BLHK, sink_H, constants, o_BLHV, lse_BHL, do_BLHV):
        p_BHL = jnp.exp(sink_H.astype(lse_BHL.dtype)[:, None] - lse_BHL)
        d_BLH = (do_BLHV.astype(lse_BHL.dtype) * o_BLHV).sum(-1)
        return jnp.zeros_like(q_BLHK), -(p_BHL * d_BLH.swapaxes(1, 2)).sum((0, 2))

    return Part(forward, backward)


def folded(part: Part) -> Part:
    """`part` for keys [1, S, G, K] that all sequences share.

    The batch becomes one long sequence of queries: no key is copied for each sequence, and the kernel itself sums the
    gradients of the keys.
    """

    def rows(x_BLHK):
        return x_BLHK.reshape(1, -1, *x_BLHK.shape[2:])

    def forward(q_BLHK, k, v, constants):
        B, L, H, _ = q_BLHK.shape
        o, lse = part.forward(rows(q_BLHK), k, v, constants)
        return o.reshape(B, L, H, -1), lse.reshape(H, B, L).swapaxes(0, 1)

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        lse = lse_BHL.swapaxes(0, 1).reshape(1, lse_BHL.shape[1], -1)
        dq, dk, dv = part.backward(rows(q_BLHK), k, v, constants, rows(o_BLHV), lse, rows(do_BLHV))
        return dq.reshape(q_BLHK.shape), dk, dv

    return Part(forward, backward)
