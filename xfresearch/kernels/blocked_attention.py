"""Causal attention for training on CPU: skips masked keys, saves its weights and has a custom backward pass.

Each block of queries uses only the keys up to the end of the block. Arrays have heads as their first dimension and the
batch as their second: so the products with the context (batch dimensions G and B) and with the memory (batch dimension G)
are plain matrix products without a copy. A row N is a query l of one of the R heads that share keys. Weights are saved
unnormalised, with the reciprocal of their sum, because normalising the outputs is cheaper. XLA on CPU runs a small
product on one core, but it runs independent chains of operations in parallel; this is why queries are split into blocks
and the batch into parts. Gradients of keys and values are products into [K, S] and [K, M]: on CPU these are faster than
products into [S, K] and [M, K].
"""

import math

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import CAUSAL, Slots, visible
from xfresearch.kernels.on_mesh import on_mesh

# The fastest of 1, 2, 4, 8 at 256 tokens on 2 cores.
BLOCKS = 4  # of queries
PARTS = 4  # of the batch


def blocked(q_BLHK, k_BSGK, v_BSGK, memory, segments, mesh=None):
    """o_BLHK for queries and keys at the same positions, from 0.

    On a mesh each device has its own whole sequences and its own heads.
    """
    return on_mesh(_split_batch, mesh, q_BLHK, k_BSGK, v_BSGK, memory, segments, keys="S")


def _split_batch(_, q_BLHK, k_BSGK, v_BSGK, memory, segments):
    B, L, H, K = q_BLHK.shape
    q_BLGRK = q_BLHK.reshape(B, L, -1, H // k_BSGK.shape[2], K)
    count = math.gcd(B, PARTS)

    def split(x):
        return jnp.split(x, count)

    parts_of_memory = [memory] * count
    parts_of_segments: list = [None] * count
    if memory is not None and memory.query is not None:
        parts_of_memory = [memory._replace(query=q) for q in split(memory.query.reshape(q_BLGRK.shape))]
    if segments:
        parts_of_segments = list(zip(*map(split, segments), strict=True))
    parts = zip(split(q_BLGRK), split(k_BSGK), split(v_BSGK), parts_of_memory, parts_of_segments, strict=True)
    return jnp.concatenate([_blocked(*part) for part in parts]).reshape(q_BLHK.shape)


@jax.custom_vjp
def _blocked(q_BLGRK, k_BSGK, v_BSGK, memory, segments):
    return _blocked_forward(q_BLGRK, k_BSGK, v_BSGK, memory, segments)[0]


def _spans(length: int) -> list[tuple[int, int]]:
    size = -(-length // BLOCKS)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _to_rows(x_BLGRK):
    """x_GBNK, with heads first and rows (l, r)."""
    B, L, G, R, K = x_BLGRK.shape
    return x_BLGRK.transpose(2, 0, 1, 3, 4).reshape(G, B, L * R, K)


def _from_rows(parts, shape):
    """The inverse of `_to_rows`, for parts with consecutive rows."""
    B, L, G, R, K = shape
    return jnp.concatenate(parts, 2).reshape(G, B, L, R, K).transpose(1, 2, 0, 3, 4)


def _blocked_forward(q_BLGRK, k_BSGK, v_BSGK, memory, segments):
    R = q_BLGRK.shape[3]
    q = _to_rows(q_BLGRK)
    k = k_BSGK.transpose(2, 0, 1, 3)
    v = v_BSGK.transpose(2, 0, 1, 3)
    memory_q = None if memory is None or memory.query is None else _to_rows(memory.query)
    outputs = []
    saved = []
    for start, end in _spans(q_BLGRK.shape[1]):
        part = segments and (segments[0][:, start:end], segments[1][:, :end])
        distance_LS = jnp.arange(start, end)[:, None] - jnp.arange(end)
        mask_BNS = jnp.repeat(visible(distance_LS, CAUSAL, part), R, 1)
        rows = slice(None), slice(None), slice(start * R, end * R)
        slots = memory and memory._replace(query=q[rows] if memory_q is None else memory_q[rows])
        o, weights = _block_forward(q[rows], k[:, :, :end], v[:, :, :end], slots, mask_BNS, segments is not None)
        outputs.append(o)
        saved.append(weights)
    o_BLGRK = _from_rows(outputs, q_BLGRK.shape).astype(q.dtype)
    return o_BLGRK, (q, k, v, memory and memory._replace(query=memory_q), o_BLGRK, saved)


def _block_forward(q_GBNK, k_GBSK, v_GBSK, memory, mask_BNS, empty_rows: bool):
    wide = wide_dtype(q_GBNK)
    dtype = q_GBNK.dtype
    scale = 1 / math.sqrt(q_GBNK.shape[-1])
    logits = jnp.einsum("GBNK,GBSK->GBNS", q_GBNK, k_GBSK, preferred_element_type=wide) * scale
    logits = jnp.where(mask_BNS, logits, jnp.finfo(wide).min)
    top = logits.max(-1, keepdims=True)
    to_memory = pm = None
    if memory is not None:
        to_memory = jnp.einsum("GBNK,MGK->GBNM", memory.query, memory.key, preferred_element_type=wide) * scale
        top = jnp.maximum(top, to_memory.max(-1, keepdims=True))
    p = jnp.exp(logits - top)
    if empty_rows:
        p = jnp.where(mask_BNS, p, 0)
    total = p.sum(-1, keepdims=True)
    o = jnp.einsum("GBNS,GBSK->GBNK", p.astype(dtype), v_GBSK, preferred_element_type=wide)
    if memory is not None and to_memory is not None:
        pm = jnp.exp(to_memory - top)
        total += pm.sum(-1, keepdims=True)
        pm = pm.astype(dtype)
        o += jnp.einsum("GBNM,MGK->GBNK", pm, memory.value, preferred_element_type=wide)
    reciprocal = 1 / jnp.where(total > 0, total, 1)
    return o * reciprocal, (p.astype(dtype), pm, reciprocal)


def _blocked_backward(residuals, do_BLGRK):
    q, k, v, memory, o_BLGRK, saved = residuals
    L, _, R = o_BLGRK.shape[1:4]
    wide = wide_dtype(q)
    do = _to_rows(do_BLGRK)
    delta = _to_rows((do_BLGRK.astype(wide) * o_BLGRK).sum(-1, keepdims=True))
    memory_queries = memory is not None and memory.query is not None  # separate queries for the slots
    blocks = []
    for (start, end), weights in zip(_spans(L), saved, strict=True):
        rows = slice(None), slice(None), slice(start * R, end * R)
        slots = memory and memory._replace(query=memory.query[rows] if memory_queries else q[rows])
        blocks.append(_block_backward(q[rows], k[:, :, :end], v[:, :, :end], slots, weights, do[rows], delta[rows]))
    dq, dk, dv, dslots = zip(*blocks, strict=True)
    if memory is not None:
        dq_memory, dmk, dmv = zip(*dslots, strict=True)
        dq = dq if memory_queries else tuple(a + b for a, b in zip(dq, dq_memory, strict=True))
        dquery = _from_rows(dq_memory, o_BLGRK.shape).astype(q.dtype) if memory_queries else None
        dmk_MGK, dmv_MGK = (sum(x).transpose(2, 0, 1).astype(memory.key.dtype) for x in (dmk, dmv))
        dslots = Slots(dquery, dmk_MGK, dmv_MGK)
    dq_BLGRK = _from_rows(dq, o_BLGRK.shape).astype(q.dtype)
    dk_BSGK, dv_BSGK = (_sum_prefixes(x, L).transpose(1, 3, 0, 2).astype(q.dtype) for x in (dk, dv))
    return dq_BLGRK, dk_BSGK, dv_BSGK, None if memory is None else dslots, None


def _block_backward(q_GBNK, k_GBSK, v_GBSK, memory, weights, do_GBNK, delta_GBN1):
    """Gradients of a block: dq [G, B, N, K], dk and dv [G, B, K, S], and those of the slots: dq of their queries, dk and dv
    [G, K, M], or None without slots."""
    p, pm, reciprocal = weights
    wide = reciprocal.dtype
    dtype = q_GBNK.dtype
    scale = 1 / math.sqrt(q_GBNK.shape[-1])
    g = (do_GBNK * reciprocal).astype(dtype)
    delta = delta_GBN1 * reciprocal
    dp = jnp.einsum("GBNK,GBSK->GBNS", g, v_GBSK, preferred_element_type=wide)
    ds = (p * (dp - delta) * scale).astype(dtype)
    dq = jnp.einsum("GBNS,GBSK->GBNK", ds, k_GBSK, preferred_element_type=wide)
    dk = jnp.einsum("GBNK,GBNS->GBKS", q_GBNK, ds, preferred_element_type=wide)
    dv = jnp.einsum("GBNK,GBNS->GBKS", g, p, preferred_element_type=wide)
    if memory is None:
        return dq, dk, dv, None
    dp = jnp.einsum("GBNK,MGK->GBNM", g, memory.value, preferred_element_type=wide)
    ds = (pm * (dp - delta) * scale).astype(dtype)
    dq_memory = jnp.einsum("GBNM,MGK->GBNK", ds, memory.key, preferred_element_type=wide)
    dmk = jnp.einsum("GBNK,GBNM->GKM", memory.query, ds, preferred_element_type=wide)
    dmv = jnp.einsum("GBNK,GBNM->GKM", g, pm, preferred_element_type=wide)
    return dq, dk, dv, (dq_memory, dmk, dmv)


def _sum_prefixes(parts, length: int):
    """Sum of arrays [G, B, K, s] with different s, each padded with zeros to `length`."""
    return sum(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, length - x.shape[3]))) for x in parts)


_blocked.defvjp(_blocked_forward, _blocked_backward)
