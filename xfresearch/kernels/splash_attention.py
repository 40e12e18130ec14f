"""Attention on TPU with JAX's splash kernel, which computes the mask inside the kernel and skips masked blocks.

Keys are [memory; tokens]. In two cases memory and tokens are separate calls that are merged. First, if documents are
packed: the kernel only compares segment ids for equality, but every document sees the memory. Second, if the memory has
its own queries (those before RoPE). Lengths are padded to multiples of the kernel's block sizes.

On a mesh each device has its own sequences, heads and queries, and all keys.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import NamedSharding, PartitionSpec

from xfresearch.kernels.masks import EVERYTHING, Mask
from xfresearch.kernels.merged_attention import Part, folded, sink_part, with_slots
from xfresearch.kernels.on_mesh import on_mesh, pad, padded

LANES = 128  # the smallest block; all lengths must be multiples of it
BLOCK = 512  # the largest block: MaxText's on every TPU generation (its base.yml); measure before using larger ones
INTERPRET = False  # tests set it: Pallas's interpreter runs the kernels on CPU


def splash(q_BLHK, k_BSGK, v_BSGV, memory, segments, mask: Mask, mesh=None, softcap=0.0):
    """o_BLHV for queries and keys at the same positions, from 0. q is already scaled.

    segments: (of queries, of keys) or None.
    """
    L = q_BLHK.shape[1]
    shards = 1 if mesh is None else mesh.shape["context"]
    length = padded(L, LANES * shards)
    q, k, v = (pad(x, length) for x in (q_BLHK, k_BSGK, v_BSGV))
    if segments is not None:
        segments = pad(segments[0], length, -1), pad(segments[1], length, -1)
    joined = memory.key.shape[0] if _slots_join_tokens(memory, segments) else 0  # slots among the kernel's keys
    if memory is not None and memory.query is not None:
        memory = memory._replace(query=pad(memory.query, length))
    heads = q.shape[2] // (1 if mesh is None else mesh.shape["tensor"])
    grid = LazyMask(length, padded(joined + length, LANES), mask, seen=L, slots=joined)
    kernel = make_kernel(grid, heads, shards, softcap)
    spec = None if mesh is None else kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "context")))
    local = partial(_local, softcap)
    return on_mesh(local, mesh, q, k, v, memory, segments, keys="S", extra=kernel, extra_spec=spec)[:, :L]


def _local(softcap, kernel, q_BLHK, k_BSGK, v_BSGV, memory, segments):
    """The computation of one device: its sequences, heads and queries, and all keys."""
    B = q_BLHK.shape[0]
    joined = _slots_join_tokens(memory, segments)
    if joined:
        k_BSGK, v_BSGV = (
            jnp.concatenate([jnp.broadcast_to(m, (B, *m.shape)), x], 1)
            for m, x in ((memory.key, k_BSGK), (memory.value, v_BSGV))
        )
        k_BSGK, v_BSGV = (pad(x, padded(x.shape[1], LANES)) for x in (k_BSGK, v_BSGV))
    if memory is None or joined:
        ids = None if segments is None else kernels.SegmentIds(*segments)
        return _heads_first(jax.vmap(kernel)(*map(_heads_first, (q_BLHK, k_BSGK, v_BSGV)), ids))
    tokens = splash_part(kernel), (k_BSGK, v_BSGV), (segments, mask_infos(kernel))
    return with_slots(tokens, q_BLHK, memory, memory_part(q_BLHK, memory, softcap))


def _slots_join_tokens(memory, segments) -> bool:
    """Whether one call has both slots and tokens as its keys."""
    return memory is not None and memory.query is None and segments is None and memory.sink_H is None


def memory_part(q_BLHK, memory, softcap=0.0):
    """Attention to the slots: (part, its keys and values, its constants)."""
    if memory.sink_H is not None:
        return sink_part(), (memory.sink_H,), None
    B, L, H, _ = q_BLHK.shape
    M = memory.key.shape[0]
    slots = tuple(pad(m[None], padded(M, LANES)) for m in (memory.key, memory.value))
    kernel = make_kernel(LazyMask(B * L, padded(M, LANES), EVERYTHING, seen=M), H, 1, softcap)
    return folded(splash_part(kernel)), slots, (None, mask_infos(kernel))


def ring_parts(q_BLHK, mask: Mask, steps: int):
    """Attention to the keys of the device t places before, for each step t: parts, and constants without segments."""
    L, H = q_BLHK.shape[1:3]
    step_kernels = [make_kernel(LazyMask(L, L, mask, seen=L, offset=t * L), H, 1) for t in range(steps)]
    return tuple(map(splash_part, step_kernels)), tuple(map(mask_infos, step_kernels))


def splash_part(kernel) -> Part:
    """The kernel as a part of a merged softmax. Its constants are (segments or None, mask_infos(kernel))."""
    settings = kernel.kwargs

    def forward(q_BLHK, k, v, constants):
        segments, info = constants
        ids = None if segments is None else kernels.SegmentIds(*segments)
        with_lse = kernels.SplashAttentionKernel(*info, **(settings | {"save_residuals": True}))
        o, (lse_BHL,) = jax.vmap(with_lse)(*map(_heads_first, (q_BLHK, k, v)), ids)
        seen = jnp.isfinite(lse_BHL)  # the kernel computes 0 / 0 for a block of queries that sees no key
        return _heads_first(jnp.where(seen[..., None], o, 0)), jnp.where(seen, lse_BHL, jnp.finfo(lse_BHL.dtype).min)

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        segments, info = constants
        ids = None if segments is None else kernels.SegmentIds(*segments)

        def of_sequence(q, k, v, ids, o, lse, do):
            residuals = (q, k, v, ids, None, o, lse, *info[1:])  # None: no sinks
            # A private function: the public kernel's backward pass does not accept the lse of the whole softmax.
            return kernels._splash_attention_bwd(**settings, res=residuals, do=do)[3:6]

        q, k, v, o, do = map(_heads_first, (q_BLHK, k, v, o_BLHV, do_BLHV))
        return tuple(map(_heads_first, jax.vmap(of_sequence)(q, k, v, ids, o, lse_BHL, do)))

    return Part(forward, backward)


def mask_infos(kernel) -> tuple:
    """The arrays that describe the blocks of the kernel's mask."""
    return kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info


class LazyMask(splash_masks.Mask):
    """A mask without an array: the kernel computes `mask_function`.

    Queries are at positions from `offset` on, keys [slots; tokens; padding] from 0 on. `seen` is the number of tokens
    without the padding.
    """

    def __init__(self, queries: int, keys: int, mask: Mask, *, seen: int, slots: int = 0, offset: int = 0):
        self.key = (queries, keys, mask, seen, slots, offset)
        self.q_sequence = np.arange(queries, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        return self.key[:2]

    def mask_function(self, query, key):
        _, _, mask, seen, slots, offset = self.key
        # A causal mask hides padded keys, because they are later than every token.
        visible = mask.sees(query + offset + slots - key) if mask.causal else (query >= 0) & (key < slots + seen)
        return visible | (key < slots) if slots else visible

    def __getitem__(self, where) -> np.ndarray:
        rows, columns = (
            np.arange(*part.indices(size), dtype=np.int32) for part, size in zip(where, self.shape, strict=True)
        )
        # Splash attention reads every block several times, and few blocks are mixed. Whether a token's key is visible
        # depends only on its distance or, without a causal mask, on its column. So the first row and the first column
        # of a block contain every value of the block.
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
    """The splash kernel for `heads` heads and the mask `grid`, with queries in `shards` and softcapped logits."""
    block_q = block_size(grid.shape[0] // shards)
    block_k = block_size(grid.shape[1])
    sizes: dict[str, Any] = {"block_q": block_q, "block_q_dkv": block_q, "block_q_dq": block_q}
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
    """The largest multiple of LANES, at most BLOCK, that divides `length`."""
    return next(size for size in range(BLOCK, 0, -LANES) if length % size == 0)


def _heads_first(x_BLHK):
    return x_BLHK.swapaxes(1, 2)
