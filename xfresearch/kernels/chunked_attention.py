"""Attention with an online softmax over chunks of keys, in plain JAX: memory linear in the length, on every platform.

Milakov & Gimelshein 2018, alg. 3; Rabe & Staats 2021. The custom backward pass recomputes the logits.
"""

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import EVERYTHING, Mask, visible
from xfresearch.kernels.merged_attention import Part, folded, sink_part, with_slots
from xfresearch.kernels.on_mesh import on_mesh, pad, padded
from xfresearch.kernels.softcap import softcap_slope, softcapped

CHUNK = 512  # keys per chunk; not tuned


def chunked(q_BLHK, k_BSGK, v_BSGV, memory, segments, mask: Mask, mesh=None, softcap=0.0):
    """o_BLHV for queries and keys at the same positions, from 0. q is already scaled.

    segments: those of masks.visible.
    """

    def local(_, q, k, v, memory, segments):
        sharded = mesh is not None and mesh.shape["context"] > 1
        offset = jax.lax.axis_index("context") * q.shape[1] if sharded else 0
        tokens = chunked_part(mask, softcap), (k, v), (segments, offset)
        return with_slots(tokens, q, memory, memory and memory_part(q, memory, softcap))

    return on_mesh(local, mesh, q_BLHK, k_BSGK, v_BSGV, memory, segments, keys="S")


def chunked_part(mask: Mask, softcap=0.0) -> Part:
    """A part of a merged softmax.

    Its constants are (segments or None, position of the first query); the first key is at position 0.
    """

    def capped_logits(q_BLGRK, k_BSGK):
        logits = jnp.einsum("BLGRK,BSGK->BGRLS", q_BLGRK, k_BSGK, preferred_element_type=wide_dtype(q_BLGRK))
        return softcapped(logits, softcap)

    def forward(q_BLHK, k, v, constants):
        B, L, H, K = q_BLHK.shape
        G, V = v.shape[2:]
        q = q_BLHK.reshape(B, L, G, H // G, K)
        wide = wide_dtype(q_BLHK)
        lowest = jnp.finfo(wide).min

        def step(carry, chunk):
            o, top, total = carry
            k, v = chunk[:2]
            logits = capped_logits(q, k)
            seen = _seen(constants, mask, L, chunk)
            new = jnp.maximum(top, jnp.where(seen, logits, lowest).max(-1))
            p = jnp.where(seen, jnp.exp(logits - new[..., None]), 0)
            shrink = jnp.exp(top - new)
            added = jnp.einsum("BGRLS,BSGV->BGRLV", p.astype(v.dtype), v, preferred_element_type=wide)
            return (o * shrink[..., None] + added, new, total * shrink + p.sum(-1)), None

        start = (B, G, H // G, L)
        carry = jnp.zeros((*start, V), wide), jnp.full(start, lowest), jnp.zeros(start, wide)
        (o, top, total), _ = jax.lax.scan(step, carry, _chunks(k, v, constants))
        divisor = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(divisor), lowest)
        o_BLHV = (o / divisor[..., None]).transpose(0, 3, 1, 2, 4).reshape(B, L, H, V)
        return o_BLHV, lse.reshape(B, H, L)

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        B, L, H, _ = q_BLHK.shape
        G = v.shape[2]
        S = k.shape[1]
        q, do = (x.reshape(B, L, G, H // G, -1) for x in (q_BLHK, do_BLHV))
        wide = wide_dtype(q)
        lse = lse_BHL.reshape(B, G, H // G, L, 1)
        delta = (do_BLHV.astype(wide) * o_BLHV).sum(-1).reshape(B, L, G, H // G).transpose(0, 2, 3, 1)[..., None]

        def step(dq, chunk):
            k, v = chunk[:2]
            logits = capped_logits(q, k)
            seen = _seen(constants, mask, L, chunk)
            p = jnp.exp(jnp.where(seen, logits - lse, -jnp.inf))
            dp = jnp.einsum("BLGRV,BSGV->BGRLS", do, v, preferred_element_type=wide)
            ds = (p * (dp - delta) * softcap_slope(logits, softcap)).astype(q.dtype)
            dq += jnp.einsum("BGRLS,BSGK->BLGRK", ds, k, preferred_element_type=wide)
            dk = jnp.einsum("BGRLS,BLGRK->BSGK", ds, q, preferred_element_type=wide)
            dv = jnp.einsum("BGRLS,BLGRV->BSGV", p.astype(q.dtype), do, preferred_element_type=wide)
            return dq, (dk, dv)

        dq, gradients = jax.lax.scan(step, jnp.zeros(q.shape, wide), _chunks(k, v, constants))
        dk, dv = (x.swapaxes(0, 1).reshape(B, -1, *x.shape[3:])[:, :S] for x in gradients)
        return dq.reshape(q_BLHK.shape), dk, dv

    return Part(forward, backward)


def memory_part(q_BLHK, memory, softcap=0.0):
    """Attention to the slots: (part, its keys and values, its constants)."""
    if memory.sink_H is not None:
        return sink_part(), (memory.sink_H,), None
    return folded(chunked_part(EVERYTHING, softcap)), (memory.key[None], memory.value[None]), (None, 0)


def ring_parts(q_BLHK, mask: Mask, steps: int):
    """Attention to the keys of the device t places before, for each step t: parts, and constants without segments."""
    return (chunked_part(mask),) * steps, tuple(t * q_BLHK.shape[1] for t in range(steps))


def _chunks(k_BSGK, v_BSGV, constants) -> tuple:
    """Keys, values, positions (-1 for padding) and segments, split into chunks along a new first axis."""
    B, S = k_BSGK.shape[:2]
    size = min(CHUNK, S)
    length = padded(S, size)
    segments, _ = constants

    def split(x, fill=0):
        return pad(x, length, fill).reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    ids = None if segments is None else tuple(map(split, segments[1:]))
    return split(k_BSGK), split(v_BSGV), split(jnp.arange(S)[None], -1)[:, 0], ids


def _seen(constants, mask: Mask, L: int, chunk):
    """Which keys of a chunk each query sees, [B or 1, 1, 1, L or 1, S]."""
    segments, offset = constants
    _, _, position_S, of_keys = chunk
    of_chunk = None if segments is None else (segments[0], *of_keys)
    seen = visible(offset + jnp.arange(L)[:, None] - position_S, mask, of_chunk)
    inside = (position_S >= 0)[None, None]
    return (inside if seen is None else seen & inside)[:, None, None]
