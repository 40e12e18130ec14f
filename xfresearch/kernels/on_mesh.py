"""What attention's kernels share: arrays cut over a mesh by hand, one number of key-value heads, padding."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.masks import Slots
from xfresearch.sharding.partition import activation_spec


def on_mesh(local, mesh, q_BLHK, k, v, memory, segments, *, keys: str, extra=None, extra_spec=None):
    """local(extra, q, k, v, memory, segments) on each device's own sequences, heads and queries: o_BLHV.

    keys: 'S', all of them are on every device, or 'L', they are cut like the queries. Memory slots are cut by head alone.
    """
    if mesh is None:
        return local(extra, q_BLHK, k, v, memory, segments)
    spec = partial(activation_spec, mesh)
    slots = None
    if memory is not None:
        slots = Slots(None if memory.query is None else spec("BLHK", q_BLHK.shape), *[spec("MGK", memory.key.shape)] * 2)
    documents = (spec("BL", q_BLHK.shape[:2]), spec(f"B{keys}", k.shape[:2])) if segments else None
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            *(extra_spec, spec("BLHK", q_BLHK.shape), spec(f"B{keys}GK", k.shape), spec(f"B{keys}GK", v.shape)),
            *(slots, documents),
        ),
        out_specs=spec("BLHK", q_BLHK.shape),
        check_vma=False,  # Pallas calls do not say over which axes their outputs vary
    )
    return run(extra, q_BLHK, k, v, memory, segments)


def share_heads(k_BSGK, v_BSGV, memory):
    """Keys, values and memory slots with one number of heads, those of fewer heads repeated."""
    own = () if memory is None else (memory.key, memory.value)
    G = math.lcm(k_BSGK.shape[2], v_BSGV.shape[2], *(m.shape[1] for m in own))

    def repeat(x):
        return x if x.shape[-2] == G else jnp.repeat(x, G // x.shape[-2], -2)

    return repeat(k_BSGK), repeat(v_BSGV), memory and Slots(memory.query, *map(repeat, own))


def pad(x, length: int, fill=0):
    """x, its second dimension filled up to `length`."""
    rest = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *rest), constant_values=fill)


def padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
