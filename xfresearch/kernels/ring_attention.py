"""Ring attention (Liu et al. 2023, sec. 3): the sequence is sharded over `context`, keys and values rotate in a ring.

At step t device i has the keys of device i - t. The mask there depends only on t, because the distance is always t
shards. So each step has its own kernel, and the steps are parts of one softmax,

    lse = log sum_t exp(lse_t)        o = sum_t exp(lse_t - lse) o_t

A device never holds more keys than its own and those that pass through. Steps beyond the window are left out. Under a
causal mask device i skips the steps t > i; the last device skips none and determines the time.

The backward pass rotates the keys and values once more, together with their gradients. Each step's kernel receives the
merged o and lse (kernels/merged_attention.py).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.kernels import chunked_attention, splash_attention
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import Mask
from xfresearch.kernels.merged_attention import Part, merge
from xfresearch.kernels.on_mesh import on_mesh
from xfresearch.sharding.devices import platform

AXIS = "context"


class Ring(NamedTuple):
    steps: tuple[Part, ...]  # step t is attention to the keys of the device t places before
    devices: int
    causal: bool
    memory: Part | None


def ring(q_BLHK, k_BLGK, v_BLGV, memory, segments, mask: Mask, mesh):
    """o_BLHV for queries and keys at the same positions, from 0. q is already scaled.

    segments: (of queries, of keys) or None.
    """
    devices = mesh.shape[AXIS]
    length = q_BLHK.shape[1] // devices
    steps = steps_of(mask, length, devices)
    use_splash = platform(mesh) == "tpu" and length % splash_attention.LANES == 0
    kernels = splash_attention if use_splash else chunked_attention

    def local(_, q, k, v, memory, segments):
        parts, constants = kernels.ring_parts(q, mask, steps)
        part = slots = memory_constants = None
        if memory is not None:
            part, keys_values, memory_constants = kernels.memory_part(q, memory)
            slots = (memory.queries(q), *keys_values)
        settings = Ring(parts, devices, mask.causal, part)
        return _ring(settings, q, (k, v), slots, (segments, constants, memory_constants))

    return on_mesh(local, mesh, q_BLHK, k_BLGK, v_BLGV, memory, segments, keys="L")


def steps_of(mask: Mask, length: int, devices: int) -> int:
    """The number of shards of `length` tokens that a query may see, its own included."""
    if not (mask.causal and mask.window):
        return devices
    farthest = mask.nearest + mask.window - 1  # tokens back
    return min(devices, 1 + -(-farthest // length))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(settings: Ring, q_BLHK, keys_values, slots, constants):
    return _forward(settings, q_BLHK, keys_values, slots, constants)[0]


def _forward(settings, q_BLHK, keys_values, slots, constants):
    segments, of_steps, of_memory = constants
    q_ids, ids = segments or (None, None)
    merged: Any = None if slots is None else settings.memory.forward(*slots, of_memory)
    rotating = (*keys_values, ids)
    for t, part in enumerate(settings.steps):
        rotating = _rotate(settings, rotating, 1) if t else rotating
        k, v, ids = rotating
        run = partial(part.forward, q_BLHK, k, v, (_pair(q_ids, ids), of_steps[t]))
        result = _unless_masked(settings, t, run, _empty_result)
        merged = result if merged is None else merge([merged, result])
    o = merged[0].astype(q_BLHK.dtype)
    return o, (q_BLHK, keys_values, slots, constants, o, merged[1])


def _backward(settings, residuals, do_BLHV):
    q_BLHK, keys_values, slots, constants, *merged = residuals
    segments, of_steps, of_memory = constants
    q_ids, ids = segments or (None, None)
    dq = jnp.zeros(q_BLHK.shape, wide_dtype(q_BLHK))
    dslots = None
    if slots is not None:
        dslots = _like(settings.memory.backward(*slots, of_memory, *merged, do_BLHV), slots)
    gradients = tuple(jnp.zeros(x.shape, wide_dtype(x)) for x in keys_values)
    rotating = (*keys_values, ids, gradients)
    for t, part in enumerate(settings.steps):
        rotating = _rotate(settings, rotating, 1) if t else rotating
        k, v, ids, gradients = rotating
        run = partial(part.backward, q_BLHK, k, v, (_pair(q_ids, ids), of_steps[t]), *merged, do_BLHV)
        dq_step, *added = _unless_masked(settings, t, run, lambda shapes: jax.tree.map(_zeros, shapes))
        dq += dq_step
        rotating = (k, v, ids, tuple(a + b for a, b in zip(gradients, added, strict=True)))
    gradients = _rotate(settings, rotating[3], 1 - len(settings.steps))  # back to the devices that own the keys
    return dq.astype(q_BLHK.dtype), _like(gradients, keys_values), dslots, None


_ring.defvjp(_forward, _backward)


def _unless_masked(settings: Ring, t: int, run, empty):
    """run(), or empty(its shapes) if a causal mask hides all keys of step t from this device's queries."""
    if t == 0 or not settings.causal:
        return run()
    return jax.lax.cond(jax.lax.axis_index(AXIS) >= t, run, lambda: empty(jax.eval_shape(run)))


def _empty_result(shapes):
    o, lse = shapes
    return _zeros(o), jnp.full(lse.shape, jnp.finfo(lse.dtype).min, lse.dtype)


def _zeros(shape):
    return jnp.zeros(shape.shape, shape.dtype)


def _rotate(settings: Ring, arrays, distance: int):
    """Moves each device's arrays to the device `distance` places after it."""
    moves = [(i, (i + distance) % settings.devices) for i in range(settings.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, moves), arrays)


def _pair(q_ids, ids):
    return None if q_ids is None else (q_ids, ids)


def _like(gradients, arrays) -> tuple:
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, arrays, strict=True))
