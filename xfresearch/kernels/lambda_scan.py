"""The causal lambda layer along a sequence, chunk by chunk, in time linear in its length (equation: models/lambda_layer.py).

A lambda maps a query (K) to an output (V), is shared by all H heads, and is never formed for every position: a chunk of C
positions starts from what the state says of all positions before it and meets its own keys one by one.

    w_nm = exp(k_m - top_n)        top_n: running maximum of the keys up to n, per key dimension and position
    a_nm = (w_nm / total_n + e_{n-m}) . q_n        y_n = sum_m a_nm v_m + (exp(top - top_n) content / total_n)^T q_n

top_n is that of the position, not that of the chunk, so every exponent is at most 0 and every total at least 1, however
fast keys grow or fall. Letters: N queries of a chunk and M = C keys, S = R - 1 + C values that they see, R window, U depth.

The state is the cache of decoding: `top`, `total` [B, U, K] and `content` [B, U, K, V] of the last token's document,
`values` [B, R - 1, U, V] before the chunk (zero where of another document), `segment` [B] of the last token.

FLOPs per token, at any length L, with c = min(C, L):
2 U (H K (c + R) + H V (c + R - 1) + H K V + K V). The last chunk's queries meet c keys too: zeros stand for what is missing.
"""

from functools import partial

import jax
import jax.numpy as jnp


def empty_state(batch: int, window: int, depth: int, key_size: int, value_size: int, dtype) -> dict:
    """The state before the first token. Sums are in float32 or wider, values in `dtype`."""
    wide, sizes = jnp.promote_types(dtype, jnp.float32), (batch, depth, key_size)
    return {
        "top": jnp.full(sizes, -jnp.inf, wide),
        "total": jnp.zeros(sizes, wide),
        "content": jnp.zeros((*sizes, value_size), wide),
        "values": jnp.zeros((batch, window - 1, depth, value_size), dtype),
        "segment": jnp.zeros(batch, jnp.int32),
    }


def flops_per_token(
    length: int, chunk: int, window: int, depth: int, heads: int, key_size: int, value_size: int
) -> int:
    """Matrix products of `lambda_scan`, per token of a sequence of `length`."""
    keys, (U, H, K, V) = min(chunk, length), (depth, heads, key_size, value_size)
    return 2 * U * (H * K * (keys + window) + H * V * (keys + window - 1) + H * K * V + K * V)


def lambda_scan(q_BLHK, k_BLUK, v_BLUV, e_RUK, segments_BL, state: dict, chunk: int):
    """y_BLHV in q's dtype, and the state after the last token.

    e_RUK: row j is for the value j tokens back; R - 1 is the length of the state's `values`.
    segments_BL: a token sees those of its own segment alone. The tokens of a segment stand together.
    """
    B, L, H, _ = q_BLHK.shape
    C = min(chunk, L)
    whole, inputs = L // C * C, (q_BLHK, k_BLUK, v_BLUV, segments_BL)
    step = jax.checkpoint(partial(_chunk, e_RUK), prevent_cse=False)
    state, y = jax.lax.scan(step, state, [x[:, :whole].reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1) for x in inputs])
    y_BLHV = y.swapaxes(0, 1).reshape(B, whole, H, -1)
    if whole < L:
        q, *rest = (x[:, whole:] for x in inputs)
        missing = whole + C - L
        rest = [jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in rest]
        state, y = step(state, (q, *rest))
        y_BLHV = jnp.concatenate([y_BLHV, y], 1)
    return y_BLHV, state


def _chunk(e_RUK, state: dict, inputs):
    """The state after N tokens, and their y_BNHV; keys, values and segments are of M >= N tokens, the last ones ignored."""
    q_BNHK, k_BMUK, v_BMUV, segments_BM = inputs
    N, R, dtype, wide = q_BNHK.shape[1], e_RUK.shape[0], q_BNHK.dtype, state["top"].dtype
    dot = partial(jnp.einsum, preferred_element_type=wide)
    sees_BNS, sees_BN = _mask(state["segment"], segments_BM, N, R)
    w_BNMUK, past_BNUK, top_BNUK, total_BNUK = _weights(state, k_BMUK.astype(wide), sees_BNS[:, :, R - 1 :], sees_BN)
    v_BSUV = jnp.concatenate([state["values"], v_BMUV], 1)

    content = dot("bnhk,bnmuk->buhnm", q_BNHK, (w_BNMUK / total_BNUK[:, :, None]).astype(dtype))
    position = _skew(dot("bnhk,ruk->buhnr", q_BNHK, e_RUK[::-1]), k_BMUK.shape[1])
    a_BUHNS = jnp.where(sees_BNS[:, None, None], position, 0) + jnp.pad(content, [(0, 0)] * 4 + [(R - 1, 0)])
    past_q_BNHUK = (q_BNHK[..., None, :] * (past_BNUK / total_BNUK)[:, :, None]).astype(dtype)
    y_BNHV = dot("buhns,bsuv->bnhv", a_BUHNS.astype(dtype), v_BSUV)
    y_BNHV += dot("bnhuk,bukv->bnhv", past_q_BNHUK, state["content"].astype(dtype))

    added = dot("bmuk,bmuv->bukv", w_BNMUK[:, -1, :N].astype(dtype), v_BMUV[:, :N])
    after = {
        "top": top_BNUK[:, -1],
        "total": total_BNUK[:, -1],
        "content": past_BNUK[:, -1, ..., None] * state["content"] + added,
        "values": jnp.where(sees_BNS[:, -1, N : N + R - 1, None, None], v_BSUV[:, N : N + R - 1], 0),
        "segment": segments_BM[:, N - 1],
    }
    return after, y_BNHV.astype(dtype)


def _mask(segment_B, segments_BM, N: int, R: int):
    """Whether each query sees each of the R - 1 values before the chunk and the M in it, and what the state sums up."""
    before_BR = jnp.broadcast_to(segment_B[:, None], (len(segment_B), R - 1))
    segments_BS, segments_BN = jnp.concatenate([before_BR, segments_BM], 1), segments_BM[:, :N]
    causal_NS = jnp.arange(segments_BS.shape[1]) <= jnp.arange(N)[:, None] + R - 1
    return causal_NS & (segments_BN[:, :, None] == segments_BS[:, None]), segments_BN == segment_B[:, None]


def _weights(state: dict, k_BMUK, sees_BNM, sees_BN):
    """Weights of the chunk's keys and of the state, unnormalised, with the maximum and the sum of what each query sees.

    The maximum only shifts exponents: the result does not depend on it, so it needs no gradient.
    """
    k_BNMUK = jnp.where(sees_BNM[..., None, None], k_BMUK[:, None], -jnp.inf)
    past_BNUK = jnp.where(sees_BN[..., None, None], state["top"][:, None], -jnp.inf)
    top_BNUK = jax.lax.stop_gradient(jnp.maximum(k_BNMUK.max(2), past_BNUK))
    w_BNMUK, past_BNUK = jnp.exp(k_BNMUK - top_BNUK[:, :, None]), jnp.exp(past_BNUK - top_BNUK)
    return w_BNMUK, past_BNUK, top_BNUK, past_BNUK * state["total"][:, None] + w_BNMUK.sum(2)


def _skew(x_BUHNR, M: int):
    """[..., N, S] with S = R - 1 + M, row n moved n to the right: x[..., r] of query n stands at column n + r."""
    *batch, N, R = x_BUHNR.shape
    padded = jnp.pad(x_BUHNR, [(0, 0)] * (len(batch) + 1) + [(0, M)]).reshape(*batch, -1)
    return padded[..., : N * (R + M - 1)].reshape(*batch, N, R + M - 1)
