"""Attention on TPU by JAX's splash kernel, which computes its mask inside and skips what it hides.

Keys are [memory; tokens]. Where documents are packed, memory and tokens are two calls, merged: the kernel's segments are
equal or not, and every document sees the memory. Lengths are padded to what the kernel's blocks need.

On a mesh each device has its own sequences, heads and queries, and all keys.
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding, PartitionSpec

from xfresearch.kernels.merged_attention import Part, merged
from xfresearch.kernels.sight import Sight
from xfresearch.models.partition import activation_spec, platform

LANES = 128  # the least block, of which all lengths have to be multiples
BLOCK = 512  # the largest: what MaxText takes on every generation (its base.yml); larger ones are to be measured first
EVERYTHING = Sight(causal=False)


def splash(q_BLHK, k_BSGK, v_BSGV, memory, segments, sight: Sight, scale: float, mesh=None):
    """o_BLHV of tokens at the same positions, from 0. segments: of queries and of keys, or None."""
    L, shards = q_BLHK.shape[1], 1 if mesh is None else mesh.shape["context"]
    k_BSGK, v_BSGV, memory = share_heads(k_BSGK, v_BSGV, memory)
    length = padded(L, LANES * shards)
    q, k, v = (pad(x, length) for x in ((q_BLHK * scale).astype(q_BLHK.dtype), k_BSGK, v_BSGV))
    if segments is not None:
        segments = pad(segments[0], length, -1), pad(segments[1], length, -1)
    joined = 0 if memory is None or segments is not None else memory[0].shape[0]  # slots among the kernel's keys
    heads = q.shape[2] // (1 if mesh is None else mesh.shape["tensor"])
    kernel = _kernel(heads, length, padded(joined + length), L, joined, sight, shards, platform(mesh) != "tpu")
    if mesh is None:
        return _local(kernel, q, k, v, memory, segments)[:, :L]
    spec = partial(activation_spec, mesh)
    slots = spec("MGK", memory[0].shape) if memory else None
    documents = (spec("BL", q.shape[:2]), spec("BS", k.shape[:2])) if segments else None
    run = jax.shard_map(
        _local,
        mesh=mesh,
        in_specs=(
            kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "context"))),
            *(spec("BLHK", q.shape), spec("BSGK", k.shape), spec("BSGK", v.shape)),
            *((slots, slots) if memory else None, documents),
        ),
        out_specs=spec("BLHK", q.shape),
        check_vma=False,  # Pallas calls do not say over which axes their outputs vary
    )
    return run(kernel, q, k, v, memory, segments)[:, :L]


def _local(kernel, q_BLHK, k_BSGK, v_BSGV, memory, segments):
    """What one device computes: its sequences, its heads, its queries, all keys."""
    B, L = q_BLHK.shape[:2]
    if memory is not None and segments is None:
        k_BSGK, v_BSGV = (
            pad(jnp.concatenate([jnp.broadcast_to(m, (B, *m.shape)), x], 1), padded(m.shape[0] + x.shape[1]))
            for m, x in zip(memory, (k_BSGK, v_BSGV), strict=True)
        )
    if memory is None or segments is None:
        ids = None if segments is None else kernels.SegmentIds(*segments)
        o = jax.vmap(kernel)(*map(_heads_first, (q_BLHK, k_BSGK, v_BSGV)), ids)
        return _heads_first(o)
    M = memory[0].shape[0]
    memory = tuple(pad(m[None], padded(M)) for m in memory)
    rows = _kernel(q_BLHK.shape[2], B * L, padded(M), M, 0, EVERYTHING, 1, kernel.kwargs["interpret"])
    parts = (splash_part(kernel), splash_part(rows, folded=True))
    constants = ((kernels.SegmentIds(*segments), infos(kernel)), (None, infos(rows)))
    return merged(parts, q_BLHK, ((k_BSGK, v_BSGV), memory), constants)


def splash_part(kernel, folded=False) -> Part:
    """The kernel as a part of a merged softmax; its constants are (segments or None, infos(kernel)).

    folded: keys [1, S, G, K] are those of every sequence, so that the batch is one long sequence of queries.
    """
    settings = kernel.kwargs

    def fold(x):
        return x.reshape(1, -1, *x.shape[2:]) if folded else x

    def forward(q_BLHK, k, v, constants):
        (B, L, H, _), (ids, info) = q_BLHK.shape, constants
        with_lse = kernels.SplashAttentionKernel(*info, **(settings | {"save_residuals": True}))
        o, (lse,) = jax.vmap(with_lse)(*map(_heads_first, (fold(q_BLHK), k, v)), ids)
        lse_BHL = lse.reshape(H, B, L).swapaxes(0, 1) if folded else lse
        return _heads_first(o).reshape(B, L, H, -1), lse_BHL

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        (B, L, H, _), (ids, info) = q_BLHK.shape, constants
        lse = lse_BHL.swapaxes(0, 1).reshape(1, H, B * L) if folded else lse_BHL

        def one(q, k, v, ids, o, lse, do):
            residuals = (q, k, v, ids, None, o, lse, *info[1:])  # None: no sinks
            # Private: the public kernel offers no gradient for an lse that is not its own.
            return kernels._splash_attention_bwd(**settings, res=residuals, do=do)[3:6]

        q, k, v, o, do = map(_heads_first, (fold(q_BLHK), k, v, fold(o_BLHV), fold(do_BLHV)))
        dq, dk, dv = map(_heads_first, jax.vmap(one)(q, k, v, ids, o, lse, do))
        return dq.reshape(q_BLHK.shape), dk, dv

    return Part(forward, backward)


def infos(kernel) -> tuple:
    """The arrays that say which blocks of the kernel's mask hold what."""
    return kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info


class SightMask(masks.Mask):
    """Queries at 0 to L - 1, keys [M memory slots; S tokens; padding]. `mask_function` is computed inside the kernel."""

    def __init__(self, queries: int, keys: int, seen: int, slots: int, sight: Sight):
        self.key = (queries, keys, seen, slots, sight)
        self.q_sequence = np.arange(queries, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        return self.key[:2]

    def mask_function(self, query, key):
        _, _, seen, slots, sight = self.key
        # Under a causal mask padded keys are later than every token.
        mask = (query >= 0) & (key < slots + seen) if not sight.causal else sight.sees(query + slots - key)
        return mask | (key < slots) if slots else mask

    def __getitem__(self, where) -> np.ndarray:
        rows, columns = (np.arange(*part.indices(size)) for part, size in zip(where, self.shape, strict=True))
        return self.mask_function(rows[:, None], columns[None, :])

    def __eq__(self, other) -> bool:
        return isinstance(other, SightMask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@cache
def _kernel(heads: int, queries: int, keys: int, seen: int, slots: int, sight: Sight, shards: int, interpret: bool):
    """The kernel of `heads` heads, for `queries` queries, cut in `shards`, and keys [slots; `seen` tokens; padding]."""
    block_q, block_k = block_size(queries // shards), block_size(keys)
    sizes = {"block_q": block_q, "block_q_dkv": block_q, "block_q_dq": block_q}
    sizes |= {"block_kv": block_k, "block_kv_dkv": block_k, "block_kv_dq": block_k}
    mask = masks.MultiHeadMask([SightMask(queries, keys, seen, slots, sight)] * heads)
    with jax.ensure_compile_time_eval():
        kernel = kernels.make_splash_mha(
            mask,
            head_shards=1,
            q_seq_shards=shards,
            block_sizes=kernels.BlockSizes(**sizes),
            residual_checkpoint_name="attention",
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def padded(length: int, multiple: int = LANES) -> int:
    return -(-length // multiple) * multiple


def block_size(length: int) -> int:
    """The largest block that divides `length`, a multiple of LANES."""
    return next(size for size in range(BLOCK, 0, -LANES) if length % size == 0)


def share_heads(k_BSGK, v_BSGV, memory):
    """Keys, values and memory slots with one number of heads, those of fewer heads repeated."""
    G = math.lcm(k_BSGK.shape[2], v_BSGV.shape[2], *(m.shape[1] for m in memory or ()))

    def repeat(x):
        return x if x.shape[-2] == G else jnp.repeat(x, G // x.shape[-2], -2)

    return repeat(k_BSGK), repeat(v_BSGV), memory and tuple(map(repeat, memory))


def pad(x, length: int, fill=0):
    """x, its second dimension filled up to `length`."""
    rest = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *rest), constant_values=fill)


def _heads_first(x_BLHK):
    return x_BLHK.swapaxes(1, 2)
