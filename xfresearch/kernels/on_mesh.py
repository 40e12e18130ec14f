"""Helpers of the attention kernels: shard_map over a mesh, equal numbers of key-value heads, padding."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.masks import Slots
from xfresearch.sharding.partition import activation_spec


def on_mesh(local, mesh, q_BLHK, k, v, memory, segments, *, keys: str, extra=None, extra_spec=None):
    """o_BLHV of local(extra, q, k, v, memory, segments), called with each device's shard of sequences, heads and
    queries.

    keys: 'S' if every device has all keys, 'L' if they are sharded like the queries. Slots are sharded only by head.
    """
    if mesh is None:
        return local(extra, q_BLHK, k, v, memory, segments)
    spec = partial(activation_spec, mesh)
    slots = None
    if memory is not None:
        query = None if memory.query is None else spec("BLHK", q_BLHK.shape)
        sink = None if memory.sink_H is None else spec("H", memory.sink_H.shape)
        keys_and_values = spec("MGK", memory.key.shape)
        slots = Slots(query, keys_and_values, keys_and_values, sink)
    of_keys = (spec(f"B{keys}", k.shape[:2]),) * (len(segments) - 1) if segments else ()
    documents = (spec("BL", q_BLHK.shape[:2]), *of_keys) if segments else None
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            *(extra_spec, spec("BLHK", q_BLHK.shape), spec(f"B{keys}GK", k.shape), spec(f"B{keys}GK", v.shape)),
            *(slots, documents),
        ),
        out_specs=spec("BLHK", q_BLHK.shape),
        check_vma=False,  # Pallas calls do not declare over which axes their outputs vary
    )
    return run(extra, q_BLHK, k, v, memory, segments)


def share_heads(k_BSGK, v_BSGV, memory: Slots | None) -> tuple[jax.Array, jax.Array, Slots | None]:
    """Keys, values and memory slots with the same number of heads: arrays with fewer heads are repeated."""
    G = math.lcm(k_BSGK.shape[2], v_BSGV.shape[2], *(() if memory is None else (memory.key.shape[1], memory.value.shape[1])))

    def repeat(x):
        return x if x.shape[-2] == G else jnp.repeat(x, G // x.shape[-2], -2)

    if memory is not None:
        memory = memory._replace(key=repeat(memory.key), value=repeat(memory.value))
    return repeat(k_BSGK), repeat(v_BSGV), memory


def pad(x, length: int, fill=0):
    """x with its second dimension padded to `length`."""
    rest = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *rest), constant_values=fill)


def padded(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple
