"""The causal lambda layer along a sequence, chunk by chunk, in time linear in the length.

The equation is in models/mixers/lambda_layer.py.

A lambda maps a query (K) to an output (V). All H heads share it, and it is never formed for every position: the state
summarises all positions before a chunk of C positions, and the chunk's own keys are used one by one.

    w_nm = exp(k_m - top_n)        top_n: running maximum of the keys up to n, per key dimension and position
    a_nm = (w_nm / total_n + e_{n-m}) . q_n        y_n = sum_m a_nm v_m + (exp(top - top_n) content / total_n)^T q_n

top_n is the maximum up to position n, not of the chunk. So every exponent is at most 0 and every total at least 1,
however fast keys grow or fall. Letters: N queries of a chunk, M = C keys, S = R - 1 + C values that they see, R window,
U depth.

The state is also the cache of decoding: `top`, `total` [B, U, K] and `content` [B, U, K, V] of the last token's
document, `values` [B, R - 1, U, V] before the chunk (zero if from another document), `segment` [B] of the last token.

FLOPs per token, at any length L, with c = min(C, L):
2 U (H K (c + R) + H V (c + R - 1) + H K V + K V). The last chunk also has c keys, padded with zeros.
"""

from functools import partial

import jax
import jax.numpy as jnp


def empty_state(batch: int, window: int, depth: int, key_size: int, value_size: int, dtype) -> dict:
    """The state before the first token. Sums are in float32 or wider, values in `dtype`."""
    wide = jnp.promote_types(dtype, jnp.float32)
    sizes = (batch, depth, key_size)
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
    """FLOPs of the matrix products of `lambda_scan`, per token of a sequence of `length`."""
    keys = min(chunk, length)
    U, H, K, V = depth, heads, key_size, value_size
    return 2 * U * (H * K * (keys + window) + H * V * (keys + window - 1) + H * K * V + K * V)


def lambda_scan(q_BLHK, k_BLUK, v_BLUV, e_RUK, segments_BL, state: dict, chunk: int):
    """y_BLHV in q's dtype, and the state after the last token.

    e_RUK: row j is for the value j tokens back; R - 1 is the length of the state's `values`.
    segments_BL: a token sees only tokens of its own segment. The tokens of a segment are consecutive.
    """
    B, L, H, _ = q_BLHK.shape
    C = min(chunk, L)
    whole = L // C * C
    inputs = (q_BLHK, k_BLUK, v_BLUV, segments_BL)
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


def lambdas(k_BLUK, v_BLUV, e_RUK, segments_BL, state: dict, chunk: int):
    """lambda_BLKV, the map of each position from queries to outputs: the outputs for unit vectors as queries."""
    B, L, _, K = k_BLUK.shape
    q_BLKK = jnp.broadcast_to(jnp.eye(K, dtype=k_BLUK.dtype), (B, L, K, K))
    return lambda_scan(q_BLKK, k_BLUK, v_BLUV, e_RUK, segments_BL, state, chunk)[0]


def weights(q_BLHK, k_BLUK, e_RUK, segments_BL, state: dict, chunk: int):
    """a_BHLSU, the factor of each value in each output, (w_nm + e_{n-m}) . q_n: the outputs for unit vectors as values.
    state: the empty state of the layer, of which only the window is read."""
    B, L, U, _ = k_BLUK.shape
    v_BLUV = jnp.broadcast_to(jnp.eye(L * U, dtype=k_BLUK.dtype).reshape(L, U, L * U), (B, L, U, L * U))
    state = empty_state(B, state["values"].shape[1] + 1, U, k_BLUK.shape[-1], L * U, k_BLUK.dtype)
    a_BLHV, _ = lambda_scan(q_BLHK, k_BLUK, v_BLUV, e_RUK, segments_BL, state, chunk)
    return a_BLHV.reshape(B, L, -1, L, U).swapaxes(1, 2)


def _chunk(e_RUK, state: dict, inputs):
    """The state after N tokens, and their y_BNHV. Keys, values, segments have M >= N tokens; the rest is ignored."""
    q_BNHK, k_BMUK, v_BMUV, segments_BM = inputs
    N = q_BNHK.shape[1]
    R = e_RUK.shape[0]
    dtype = q_BNHK.dtype
    wide = state["top"].dtype
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
    """Which of the R - 1 values before the chunk and the M in it a query sees, and whether it sees the state's sums."""
    before_BR = jnp.broadcast_to(segment_B[:, None], (len(segment_B), R - 1))
    segments_BS = jnp.concatenate([before_BR, segments_BM], 1)
    segments_BN = segments_BM[:, :N]
    causal_NS = jnp.arange(segments_BS.shape[1]) <= jnp.arange(N)[:, None] + R - 1
    return causal_NS & (segments_BN[:, :, None] == segments_BS[:, None]), segments_BN == segment_B[:, None]


def _weights(state: dict, k_BMUK, sees_BNM, sees_BN):
    """Unnormalised weights of the chunk's keys and of the state, and the maximum and the sum of those each query sees.

    The maximum only shifts exponents. The result does not depend on it, so it needs no gradient.
    """
    k_BNMUK = jnp.where(sees_BNM[..., None, None], k_BMUK[:, None], -jnp.inf)
    past_BNUK = jnp.where(sees_BN[..., None, None], state["top"][:, None], -jnp.inf)
    top_BNUK = jax.lax.stop_gradient(jnp.maximum(k_BNMUK.max(2), past_BNUK))
    w_BNMUK = jnp.exp(k_BNMUK - top_BNUK[:, :, None])
    past_BNUK = jnp.exp(past_BNUK - top_BNUK)
    return w_BNMUK, past_BNUK, top_BNUK, past_BNUK * state["total"][:, None] + w_BNMUK.sum(2)


def _skew(x_BUHNR, M: int):
    """[..., N, S], S = R - 1 + M. Shifts row n by n to the right: x[..., r] of query n is in column n + r."""
    *batch, N, R = x_BUHNR.shape
    padded = jnp.pad(x_BUHNR, [(0, 0)] * (len(batch) + 1) + [(0, M)]).reshape(*batch, -1)
    return padded[..., : N * (R + M - 1)].reshape(*batch, N, R + M - 1)
