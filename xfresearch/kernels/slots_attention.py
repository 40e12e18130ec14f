"""Softmax attention to memory slots alone: o = softmax(cap(scale q k^T)) v, with one set of slots for all positions.

The queries of all sequences are rows of one matrix for each key-value head. A loop computes one block of rows after the
other and holds the weights of one block only. The backward pass computes the weights again from the logarithms of their
sums, as in FlashAttention (Dao et al. 2022, alg. 4). A row sees all slots at once, so the softmax is not online. The body
of the loop has its own chain of products for each head, because XLA on CPU runs such chains in parallel. Gradients of keys
and values are products into [K, M]: on CPU, products into [M, K] take 3 times as long.
"""

from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.softcap import softcap_slope, softcapped
from xfresearch.sharding.devices import platform
from xfresearch.sharding.partition import activation_spec

# The most weights of a head in a block. Measured on CPU (1,024 slots: 1,024 rows); on the others an estimate.
WEIGHTS = {"cpu": 1 << 20, "gpu": 1 << 25, "tpu": 1 << 25}


def slots_attention(q_BLHK, key_MGK, value_MGV, scale: float, softcap: float = 0.0, mesh=None):
    """o_BLHV in q's dtype; softmax in float32, or float64 for float64 inputs. H / G query heads share keys and values.

    mesh: the mesh that the arrays are sharded over, by their letters (sharding/letters.py).
    """
    rows = max(WEIGHTS[platform(mesh)] // len(key_MGK), 1)

    def local(q_BLHK, key_MGK, value_MGV):
        B, L, H, K = q_BLHK.shape
        G = key_MGK.shape[1]
        q_GNK = q_BLHK.reshape(B * L, G, H // G, K).swapaxes(0, 1).reshape(G, -1, K)
        o_GNV = _attend(q_GNK, key_MGK.swapaxes(0, 1), value_MGV.swapaxes(0, 1), scale, softcap, rows)
        return o_GNV.reshape(G, B * L, H // G, -1).swapaxes(0, 1).reshape(B, L, H, -1)

    if mesh is None:
        return local(q_BLHK, key_MGK, value_MGV)
    spec = partial(activation_spec, mesh)
    of_queries, of_slots = spec("BLHK", q_BLHK.shape), (spec("MGK", x.shape) for x in (key_MGK, value_MGV))
    run = jax.shard_map(local, mesh=mesh, in_specs=(of_queries, *of_slots), out_specs=of_queries, check_vma=False)
    return run(q_BLHK, key_MGK, value_MGV)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(q_GNK, k_GMK, v_GMV, scale: float, softcap: float, rows: int):
    return _forward(q_GNK, k_GMK, v_GMV, scale, softcap, rows)[0]


def _forward(q_GNK, k_GMK, v_GMV, scale: float, softcap: float, rows: int):
    keys = zip(k_GMK.swapaxes(1, 2), v_GMV, strict=True)  # transposed once, outside of the loop
    heads = [partial(_block_forward, k_KM=k_KM, v_MV=v_MV, scale=scale, softcap=softcap) for k_KM, v_MV in keys]

    def block(_, queries):
        return None, [forward(q_NK) for forward, q_NK in zip(heads, queries, strict=True)]

    blocks = jax.lax.scan(block, None, _in_blocks(q_GNK, rows))[1]
    o_GNV, lse_GN1 = (_joined(each, q_GNK.shape[1]) for each in zip(*blocks, strict=True))
    return o_GNV, (q_GNK, k_GMK, v_GMV, o_GNV, lse_GN1)


def _block_forward(q_NK, k_KM, v_MV, scale: float, softcap: float):
    """The output and the logarithm of the sum of exponentials of a block of rows of one head."""
    logits_NM = _logits(q_NK, k_KM, scale, softcap)
    top_N1 = logits_NM.max(-1, keepdims=True)
    p_NM = jnp.exp(logits_NM - top_N1)
    total_N1 = p_NM.sum(-1, keepdims=True)
    o_NV = jnp.dot(p_NM.astype(v_MV.dtype), v_MV, preferred_element_type=logits_NM.dtype) / total_N1
    return o_NV.astype(q_NK.dtype), top_N1 + jnp.log(total_N1)


def _backward(scale: float, softcap: float, rows: int, residuals, do_GNV):
    q_GNK, k_GMK, v_GMV, o_GNV, lse_GN1 = residuals
    wide = lse_GN1.dtype
    delta_GN1 = (do_GNV.astype(wide) * o_GNV).sum(-1, keepdims=True)
    keys = zip(k_GMK, k_GMK.swapaxes(1, 2), v_GMV.swapaxes(1, 2), strict=True)
    heads = [partial(_block_backward, *each, scale=scale, softcap=softcap) for each in keys]

    def block(sums, inputs):
        dq, *more = zip(*[backward(*each) for backward, *each in zip(heads, *inputs, strict=True)], strict=True)
        return jax.tree.map(jnp.add, sums, tuple(more)), list(dq)

    zeros = tuple(tuple(jnp.zeros(x.shape[::-1], wide) for x in each) for each in (k_GMK, v_GMV))
    (dk, dv), dq = jax.lax.scan(block, zeros, [_in_blocks(x, rows) for x in (q_GNK, do_GNV, delta_GN1, lse_GN1)])
    dk_GMK, dv_GMV = (jnp.stack(each).swapaxes(1, 2).astype(k_GMK.dtype) for each in (dk, dv))
    return _joined(dq, q_GNK.shape[1]), dk_GMK, dv_GMV


def _block_backward(k_MK, k_KM, v_VM, q_NK, do_NV, delta_N1, lse_N1, scale: float, softcap: float):
    """dq [N, K], and the gradients of keys and values of a block as [K, M] and [V, M]."""
    dtype = q_NK.dtype
    dot = partial(jnp.dot, preferred_element_type=lse_N1.dtype)
    logits_NM = _logits(q_NK, k_KM, scale, softcap)
    p_NM = jnp.exp(logits_NM - lse_N1)
    ds_NM = p_NM * (dot(do_NV, v_VM) - delta_N1) * (scale * softcap_slope(logits_NM, softcap))
    ds_NM = ds_NM.astype(dtype)
    return dot(ds_NM, k_MK).astype(dtype), dot(q_NK.T, ds_NM), dot(do_NV.T, p_NM.astype(dtype))


_attend.defvjp(_forward, _backward)


def _logits(q_NK, k_KM, scale: float, softcap: float):
    return softcapped(scale * jnp.dot(q_NK, k_KM, preferred_element_type=wide_dtype(q_NK)), softcap)


def _in_blocks(x_GNK, rows: int) -> list:
    """For each head, its rows in equal blocks of at most `rows` [blocks, rows, K], the last one padded with zeros."""
    N = x_GNK.shape[1]
    count = -(-N // rows)
    size = -(-N // count)
    padded = jnp.pad(x_GNK, ((0, 0), (0, count * size - N), (0, 0)))
    return [x_NK.reshape(count, size, -1) for x_NK in padded]


def _joined(heads, length: int):
    """The inverse of `_in_blocks` for `length` rows."""
    return jnp.stack([x.reshape(-1, x.shape[-1]) for x in heads])[:, :length]
