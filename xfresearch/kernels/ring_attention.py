"""Ring attention (Liu et al. 2023, sec. 3): the sequence is cut over `context`, keys and values are passed on in a ring.

At step t device i has the keys of device i - t. What its queries see there depends on t alone, t pieces being between them:
so each step has a kernel of its own, and the steps are parts of one softmax,

    lse = log sum_t exp(lse_t)        o = sum_t exp(lse_t - lse) o_t

No device ever has more keys than its own and those that it passes on. Steps that a window does not reach are left out. Under
a causal mask device i skips the steps t > i; the last device skips none and sets the pace.

The backward pass goes round once more: each step's kernel is given the merged o and lse (kernels/merged_attention.py), and
the gradients of keys and values travel with them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.kernels import chunked_attention, splash_attention
from xfresearch.kernels.masks import Mask, softmax_dtype
from xfresearch.kernels.merged_attention import Part, merge
from xfresearch.kernels.on_mesh import on_mesh
from xfresearch.sharding.devices import platform

AXIS = "context"


class Ring(NamedTuple):
    steps: tuple[Part, ...]  # step t is attention to the keys of t devices before
    devices: int
    causal: bool
    memory: Part | None


def ring(q_BLHK, k_BLGK, v_BLGV, memory, segments, mask: Mask, mesh):
    """o_BLHV of tokens at the same positions, from 0; q comes scaled. segments: of queries and of keys, or None."""
    devices = mesh.shape[AXIS]
    length = q_BLHK.shape[1] // devices
    steps = steps_of(mask, length, devices)
    fits = platform(mesh) == "tpu" and length % splash_attention.LANES == 0
    kernels = splash_attention if fits else chunked_attention

    def local(_, q, k, v, memory, segments):
        parts, constants = kernels.ring_parts(q, mask, steps)
        part = slots = memory_constants = None
        if memory is not None:
            part, keys_values, memory_constants = kernels.memory_part(q, memory)
            slots = (memory.met_by(q), *keys_values)
        settings = Ring(parts, devices, mask.causal, part)
        return _ring(settings, q, (k, v), slots, (segments, constants, memory_constants))

    return on_mesh(local, mesh, q_BLHK, k_BLGK, v_BLGV, memory, segments, keys="L")


def steps_of(mask: Mask, length: int, devices: int) -> int:
    """How many pieces of `length` tokens a query may see, its own among them."""
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
    whole = None if slots is None else settings.memory.forward(*slots, of_memory)
    travelling = (*keys_values, ids)
    for t, part in enumerate(settings.steps):
        travelling = _pass_on(settings, travelling, 1) if t else travelling
        k, v, ids = travelling
        run = partial(part.forward, q_BLHK, k, v, (_pair(q_ids, ids), of_steps[t]))
        found = _where_seen(settings, t, run, _saw_nothing)
        whole = found if whole is None else merge([whole, found])
    o = whole[0].astype(q_BLHK.dtype)
    return o, (q_BLHK, keys_values, slots, constants, o, whole[1])


def _backward(settings, residuals, do_BLHV):
    q_BLHK, keys_values, slots, constants, *of_whole = residuals
    segments, of_steps, of_memory = constants
    q_ids, ids = segments or (None, None)
    dq, dslots = jnp.zeros(q_BLHK.shape, softmax_dtype(q_BLHK)), None
    if slots is not None:
        dslots = _like(settings.memory.backward(*slots, of_memory, *of_whole, do_BLHV), slots)
    gradients = tuple(jnp.zeros(x.shape, softmax_dtype(x)) for x in keys_values)
    travelling = (*keys_values, ids, gradients)
    for t, part in enumerate(settings.steps):
        travelling = _pass_on(settings, travelling, 1) if t else travelling
        k, v, ids, gradients = travelling
        run = partial(part.backward, q_BLHK, k, v, (_pair(q_ids, ids), of_steps[t]), *of_whole, do_BLHV)
        dq_step, *added = _where_seen(settings, t, run, lambda shapes: jax.tree.map(_zeros, shapes))
        dq += dq_step
        travelling = (k, v, ids, tuple(a + b for a, b in zip(gradients, added, strict=True)))
    gradients = _pass_on(settings, travelling[3], 1 - len(settings.steps))  # back to where the keys are at home
    return dq.astype(q_BLHK.dtype), _like(gradients, keys_values), dslots, None


_ring.defvjp(_forward, _backward)


def _where_seen(settings: Ring, t: int, run, nothing):
    """run(), or nothing(its shapes) where the keys of step t are all later than this device's queries."""
    if t == 0 or not settings.causal:
        return run()
    return jax.lax.cond(jax.lax.axis_index(AXIS) >= t, run, lambda: nothing(jax.eval_shape(run)))


def _saw_nothing(shapes):
    o, lse = shapes
    return _zeros(o), jnp.full(lse.shape, jnp.finfo(lse.dtype).min, lse.dtype)


def _zeros(shape):
    return jnp.zeros(shape.shape, shape.dtype)


def _pass_on(settings: Ring, arrays, distance: int):
    """Each device's arrays, moved to the device `distance` after it."""
    moves = [(i, (i + distance) % settings.devices) for i in range(settings.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, moves), arrays)


def _pair(q_ids, ids):
    return None if q_ids is None else (q_ids, ids)


def _like(gradients, arrays) -> tuple:
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, arrays, strict=True))
