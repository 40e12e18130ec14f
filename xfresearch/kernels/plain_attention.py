"""Attention written directly from its equation: `plain`, and `banded`, its form in short blocks for a window.

Only these two kernels support biases, shaping, dropout and taps. They also support a softcap, like `splash`.
"""

import math

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import Shaping, visible
from xfresearch.kernels.on_mesh import pad
from xfresearch.kernels.softcap import softcapped


def plain(q_BLHK, k_BSGK, v_BSGV, memory, segments, distance_LS, mask, softcap, bias, shaping, dropout, tap):
    dtype = q_BLHK.dtype
    wide = wide_dtype(q_BLHK)
    M = 0 if memory is None else memory.key.shape[0]
    mask_BLS = visible(distance_LS, mask, segments)
    mask_BHLS = None if mask_BLS is None else mask_BLS[:, None]
    logits_BHLS = softcapped(scores(q_BLHK, k_BSGK), softcap)
    if bias is not None:
        logits_BHLS += bias(q_BLHK, distance_LS).astype(wide)
    if mask_BHLS is not None:
        logits_BHLS = jnp.where(mask_BHLS, logits_BHLS, jnp.finfo(wide).min)
    if memory is not None:
        to_memory = softcapped(scores(memory.queries(q_BLHK), memory.key), softcap)
        if memory.sink_H is not None:
            to_memory += memory.sink_H.astype(wide)[:, None, None]
        logits_BHLS = jnp.concatenate([to_memory, logits_BHLS], -1)
    weights = jax.nn.softmax(logits_BHLS, -1)
    rate, key = dropout
    if rate > 0:
        weights = jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)
    to_memory, to_context = jnp.split(weights, [M], -1)
    if mask_BHLS is not None and (segments is not None or mask.nearest):
        # The softmax gives a query without keys equal weights instead of zeros.
        to_context = jnp.where(mask_BHLS, to_context, 0)
    if shaping is not None:
        to_context = _shape(shaping, to_context, mask_BHLS, distance_LS)
    to_context = tap("weights", to_context) if tap else to_context
    o_BLHV = mix(to_context.astype(dtype), v_BSGV)
    if memory is not None:
        to_memory = tap("coefficients", to_memory) if tap else to_memory
        o_BLHV += mix(to_memory.astype(dtype), memory.value)
    return o_BLHV.astype(dtype)


# Query heads that share keys form one matrix with rows (r, l): XLA on CPU takes 1.5 times as long with R and L apart.


def scores(q_BLHK, k):
    """Logits [B, H, L, S] for keys [B, S, G, K], or for keys [M, G, K] that all sequences share."""
    B, L, H, K = q_BLHK.shape
    S, G = k.shape[-3:-1]
    q_BGNK = q_BLHK.transpose(0, 2, 1, 3).reshape(B, G, -1, K)
    product = "BGNK,BGSK->BGNS" if k.ndim == 4 else "BGNK,GSK->BGNS"
    logits = jnp.einsum(product, q_BGNK, k.swapaxes(-3, -2), preferred_element_type=wide_dtype(k))
    return logits.reshape(B, H, L, S) / math.sqrt(K)


def mix(w_BHLS, v):
    """Weighted sums [B, L, H, V] of values [B, S, G, V], or of values [M, G, V] that all sequences share."""
    B, H, L, S = w_BHLS.shape
    G, V = v.shape[-2:]
    product = "BGNS,BSGV->BGNV" if v.ndim == 4 else "BGNS,SGV->BGNV"
    o = jnp.einsum(product, w_BHLS.reshape(B, G, -1, S), v, preferred_element_type=wide_dtype(v))
    return o.reshape(B, H, L, V).transpose(0, 2, 1, 3)


def _shape(shaping: Shaping, w_BHLS, mask_BHLS, distance_LS):
    identity, weights, uniform = (jnp.asarray(x, w_BHLS.dtype).reshape(-1, 1, 1) for x in shaping)
    seen = jnp.ones((1, 1, *distance_LS.shape), bool) if mask_BHLS is None else mask_BHLS
    uniform_BHLS = seen / jnp.maximum(seen.sum(-1, keepdims=True), 1).astype(w_BHLS.dtype)
    return identity * (distance_LS == 0) + weights * w_BHLS - uniform * uniform_BHLS


def banded(q_BLHK, k_BSGK, v_BSGV, memory, segments, mask, **rest):
    """`plain` in blocks as long as the mask's band: queries use the keys of their own block and of the one before."""
    B, L = q_BLHK.shape[:2]
    b = mask.band
    count = -(-L // b)

    def queries(x, fill=0):
        return pad(x, count * b, fill).reshape(B * count, b, *x.shape[2:])

    def keys(x, fill=0):
        own = queries(x, fill).reshape(B, count, b, *x.shape[2:])
        before = jnp.pad(own[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (own.ndim - 2), constant_values=fill)
        return jnp.concatenate([before, own], 2).reshape(B * count, 2 * b, *x.shape[2:])

    if memory is not None and memory.query is not None:
        memory = memory._replace(query=queries(memory.query))
    q_segments, k_segments = segments or (jnp.zeros((B, L), jnp.int32),) * 2
    block_segments = queries(q_segments, -1), keys(k_segments, -2)  # different ids: no query sees a padded key
    distance_LS = (b + jnp.arange(b))[:, None] - jnp.arange(2 * b)
    o = plain(queries(q_BLHK), keys(k_BSGK), keys(v_BSGV), memory, block_segments, distance_LS, mask, **rest)
    return o.reshape(B, count * b, *o.shape[2:])[:, :L]
