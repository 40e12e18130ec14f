"""Attention on TPU by JAX's splash kernel, which computes its mask inside and skips what it hides.

Keys are [memory; tokens]. Where documents are packed, memory and tokens are two calls, merged: the kernel's segments are
equal or not, and every document sees the memory. So they are where the memory meets other queries than the tokens do (those
before RoPE). Lengths are padded to what the kernel's blocks need.

On a mesh each device has its own sequences, heads and queries, and all keys.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import NamedSharding, PartitionSpec

from xfresearch.kernels.masks import EVERYTHING, Mask
from xfresearch.kernels.merged_attention import Part, folded, merged
from xfresearch.kernels.on_mesh import on_mesh, pad, padded

LANES = 128  # the least block, of which all lengths have to be multiples
BLOCK = 512  # the largest: what MaxText takes on every generation (its base.yml); larger ones are to be measured first
INTERPRET = False  # tests have the kernels interpreted, on CPU


def splash(q_BLHK, k_BSGK, v_BSGV, memory, segments, mask: Mask, mesh=None, softcap=0.0):
    """o_BLHV of tokens at the same positions, from 0; q comes scaled. segments: of queries and of keys, or None."""
    L, shards = q_BLHK.shape[1], 1 if mesh is None else mesh.shape["context"]
    length = padded(L, LANES * shards)
    q, k, v = (pad(x, length) for x in (q_BLHK, k_BSGK, v_BSGV))
    if segments is not None:
        segments = pad(segments[0], length, -1), pad(segments[1], length, -1)
    joined = memory.key.shape[0] if _joins(memory, segments) else 0  # slots among the kernel's keys
    if memory is not None and memory.query is not None:
        memory = memory._replace(query=pad(memory.query, length))
    heads = q.shape[2] // (1 if mesh is None else mesh.shape["tensor"])
    grid = LazyMask(length, padded(joined + length, LANES), mask, seen=L, slots=joined)
    kernel = make_kernel(grid, heads, shards, softcap)
    spec = None if mesh is None else kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "context")))
    local = partial(_local, softcap)
    return on_mesh(local, mesh, q, k, v, memory, segments, keys="S", extra=kernel, extra_spec=spec)[:, :L]


def _local(softcap, kernel, q_BLHK, k_BSGK, v_BSGV, memory, segments):
    """What one device computes: its sequences, its heads, its queries, all keys."""
    B, joined = q_BLHK.shape[0], _joins(memory, segments)
    if joined:
        k_BSGK, v_BSGV = (
            jnp.concatenate([jnp.broadcast_to(m, (B, *m.shape)), x], 1)
            for m, x in ((memory.key, k_BSGK), (memory.value, v_BSGV))
        )
        k_BSGK, v_BSGV = (pad(x, padded(x.shape[1], LANES)) for x in (k_BSGK, v_BSGV))
    if memory is None or joined:
        ids = None if segments is None else kernels.SegmentIds(*segments)
        return _heads_first(jax.vmap(kernel)(*map(_heads_first, (q_BLHK, k_BSGK, v_BSGV)), ids))
    part, slots, constants = memory_part(q_BLHK, memory, softcap)
    parts, queries = (splash_part(kernel), part), (q_BLHK, memory.met_by(q_BLHK))
    return merged(parts, queries, ((k_BSGK, v_BSGV), slots), ((segments, infos(kernel)), constants))


def _joins(memory, segments) -> bool:
    """Whether slots and tokens are the keys of one call."""
    return memory is not None and memory.query is None and segments is None


def memory_part(q_BLHK, memory, softcap=0.0):
    """Attention to the slots alone: the part, its keys and values, its constants."""
    (B, L, H, _), M = q_BLHK.shape, memory.key.shape[0]
    slots = tuple(pad(m[None], padded(M, LANES)) for m in (memory.key, memory.value))
    kernel = make_kernel(LazyMask(B * L, padded(M, LANES), EVERYTHING, seen=M), H, 1, softcap)
    return folded(splash_part(kernel)), slots, (None, infos(kernel))


def ring_parts(q_BLHK, mask: Mask, steps: int):
    """Attention to the keys of t devices before, for each step t: the parts, and their constants without segments."""
    L, H = q_BLHK.shape[1:3]
    each = [make_kernel(LazyMask(L, L, mask, seen=L, offset=t * L), H, 1) for t in range(steps)]
    return tuple(map(splash_part, each)), tuple(map(infos, each))


def splash_part(kernel) -> Part:
    """The kernel as a part of a merged softmax; its constants are (segments or None, infos(kernel))."""
    settings = kernel.kwargs

    def forward(q_BLHK, k, v, constants):
        segments, info = constants
        ids = None if segments is None else kernels.SegmentIds(*segments)
        with_lse = kernels.SplashAttentionKernel(*info, **(settings | {"save_residuals": True}))
        o, (lse_BHL,) = jax.vmap(with_lse)(*map(_heads_first, (q_BLHK, k, v)), ids)
        seen = jnp.isfinite(lse_BHL)  # a block of queries that sees no key at all is 0 / 0
        return _heads_first(jnp.where(seen[..., None], o, 0)), jnp.where(seen, lse_BHL, jnp.finfo(lse_BHL.dtype).min)

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        segments, info = constants
        ids = None if segments is None else kernels.SegmentIds(*segments)

        def one(q, k, v, ids, o, lse, do):
            residuals = (q, k, v, ids, None, o, lse, *info[1:])  # None: no sinks
            # Private: the public kernel offers no gradient for an lse that is not its own.
            return kernels._splash_attention_bwd(**settings, res=residuals, do=do)[3:6]

        q, k, v, o, do = map(_heads_first, (q_BLHK, k, v, o_BLHV, do_BLHV))
        return tuple(map(_heads_first, jax.vmap(one)(q, k, v, ids, o, lse_BHL, do)))

    return Part(forward, backward)


def infos(kernel) -> tuple:
    """The arrays that say which blocks of the kernel's mask hold what."""
    return kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info


class LazyMask(splash_masks.Mask):
    """Queries at `offset` and after, keys [slots; tokens; padding] at 0 and after, of which `seen` tokens are none of the
    padding. `mask_function` is computed inside the kernel: the mask is no array."""

    def __init__(self, queries: int, keys: int, mask: Mask, *, seen: int, slots: int = 0, offset: int = 0):
        self.key = (queries, keys, mask, seen, slots, offset)
        self.q_sequence = np.arange(queries, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        return self.key[:2]

    def mask_function(self, query, key):
        _, _, mask, seen, slots, offset = self.key
        # Under a causal mask padded keys are later than every token.
        visible = mask.sees(query + offset + slots - key) if mask.causal else (query >= 0) & (key < slots + seen)
        return visible | (key < slots) if slots else visible

    def __getitem__(self, where) -> np.ndarray:
        rows, columns = (
            np.arange(*part.indices(size), dtype=np.int32) for part, size in zip(where, self.shape, strict=True)
        )
        # Every block is asked for, several times, and few are mixed. Whether a token's key is seen depends on its distance
        # or, not causal, on its column alone: a block's first row and column have all that there are in it.
        edges = np.concatenate([self.mask_function(rows[:1], columns), self.mask_function(rows, columns[:1])])
        if (columns[0] >= self.key[4] or columns[-1] < self.key[4]) and (edges.all() or not edges.any()):
            return _uniform((len(rows), len(columns)), bool(edges[0]))
        return self.mask_function(rows[:, None], columns[None, :])

    def __eq__(self, other) -> bool:
        return isinstance(other, LazyMask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@cache
def _uniform(shape: tuple[int, int], seen: bool) -> np.ndarray:
    return np.full(shape, seen)


@cache
def make_kernel(grid: LazyMask, heads: int, shards: int, softcap=0.0):
    """The kernel of `heads` heads under the mask `grid`, its queries cut into `shards`, its logits under a cap."""
    block_q, block_k = block_size(grid.shape[0] // shards), block_size(grid.shape[1])
    sizes = {"block_q": block_q, "block_q_dkv": block_q, "block_q_dq": block_q}
    sizes |= {"block_kv": block_k, "block_kv_dkv": block_k, "block_kv_dq": block_k}
    with jax.ensure_compile_time_eval():
        kernel = kernels.make_splash_mha(
            splash_masks.MultiHeadMask([grid] * heads),
            head_shards=1,
            q_seq_shards=shards,
            block_sizes=kernels.BlockSizes(**sizes),
            attn_logits_soft_cap=softcap or None,
            residual_checkpoint_name="attention",
            interpret=INTERPRET,
        )
        return jax.tree.map(np.asarray, kernel)


def block_size(length: int) -> int:
    """The largest block that divides `length`, a multiple of LANES."""
    return next(size for size in range(BLOCK, 0, -LANES) if length % size == 0)


def _heads_first(x_BLHK):
    return x_BLHK.swapaxes(1, 2)
