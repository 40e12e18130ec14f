"""The digest of an array: its dtype, its shape, and 128 bits that change when any of its elements changes or moves.

Each device digests the shards that it holds, so no element is copied to the host. The digest does not depend on the mesh:
an array that was written from one mesh is verified on another. It has four words,

    word_k = sum over elements of mix(bits XOR mask_k[position])   modulo 2^32,    k = 0 to 3,

where `bits` are those of the element, `mix` is a bijection of 32-bit words that is far from linear, and the mask of a
position is the sum of one pseudo-random word for each of its coordinates. The words depend on the path, dtype and shape of
the array. A sum of pseudo-random functions of position and value is an incremental hash (Bellare and Micciancio 1997, "A New
Paradigm for Collision-Free Hashing"). A change of one element is always detected; another change is missed with a chance of
about 2^-128. Digests protect from faults, not from somebody who may write to a checkpoint and can replace them too.
"""

import hashlib
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from xfresearch.runtime.trees import by_path
from xfresearch.sharding.placing import replicated

WORDS = 4  # of 32 bits
BLOCK = 2**17  # elements in a block: on a CPU their terms stay in the cache, on a GPU they occupy all of it
UNROLLED = 4  # blocks that are added in one step
SMALL = 2**15  # with fewer elements there are no blocks: the program compiles faster


def digests(tree) -> dict[str, str]:
    """{path: 'dtype[shape] 32 hexadecimal digits'} of the arrays of a tree. Every process that holds a part of an array
    calls this. dtypes have at most 64 bits, and are not complex."""
    leaves = {path: jnp.asarray(leaf) for path, leaf in by_path(tree).items()}
    kinds = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}
    masks = [_placed(_masks(f"{path} {kinds[path]}", _word_shape(x.shape, x.dtype)), x) for path, x in leaves.items()]
    sums = jax.device_get(_digest_all(list(leaves.values()), masks, tuple(leaf.sharding for leaf in leaves.values())))
    return {
        path: f"{kinds[path]} {''.join(f'{word:08x}' for word in words)}"
        for path, words in zip(leaves, sums, strict=True)
    }


def changed(recorded: dict, tree) -> str:
    """The first path whose array in `tree` does not have the `recorded` digest; '' if there is none. recorded: the result of
    `digests`, or of `weak_sums` in a checkpoint of an earlier version."""
    actual = weak_sums(tree) if is_weak(recorded) else digests(tree)
    return next((path for path in recorded | actual if recorded.get(path) != actual.get(path)), "")


def is_weak(recorded: dict) -> bool:
    """Whether these are sums that an earlier version recorded (`weak_sums`), which miss some changes."""
    return any(isinstance(value, int) for value in recorded.values())


def _masks(name: str, shape: tuple) -> list[np.ndarray]:
    """For each dimension, uint32 [WORDS, its size]: words that SHAKE-128 draws."""
    drawn = (hashlib.shake_128(f"{name} {axis}".encode()).digest(4 * WORDS * size) for axis, size in enumerate(shape))
    return [np.frombuffer(words, np.uint32).reshape(WORDS, -1) for words in drawn]


def _placed(masks: list[np.ndarray], leaf: jax.Array) -> list[jax.Array]:
    """The masks on every device of the array."""
    mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    assert not isinstance(mesh, AbstractMesh), "an array that exists"
    return [replicated(mesh, mask) for mask in masks]


@cache
def _word_shape(shape: tuple, dtype) -> tuple:
    return jax.eval_shape(_words, jax.ShapeDtypeStruct(shape, dtype)).shape


def _words(x) -> jax.Array:
    """The bits of each element as uint32. An element of 64 bits becomes two, in a new last dimension; a scalar becomes
    [1]."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    x = x if x.ndim else x[None]
    return jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").astype(jnp.uint32)


@partial(jax.jit, static_argnums=2)
def _digest_all(leaves: list, masks: list, shardings: tuple) -> list:
    return [_digest(*each) for each in zip(leaves, masks, shardings, strict=True)]


def _digest(x, masks: list, sharding) -> jax.Array:
    """uint32 [WORDS] of a global array, on every device."""
    words = _words(x)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return _digest_shard(words, masks)
    spec = (*sharding.spec, *[None] * (words.ndim - len(sharding.spec)))
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]

    def on_device(words, masks):
        own = [_own_part(mask, entry, size) for mask, entry, size in zip(masks, spec, words.shape, strict=True)]
        return jax.lax.psum(_digest_shard(words, own), axes)

    everywhere = PartitionSpec()
    in_specs = (PartitionSpec(*spec), everywhere)
    run = jax.shard_map(on_device, mesh=sharding.mesh, in_specs=in_specs, out_specs=everywhere, check_vma=False)
    return run(words, masks)


def _own_part(mask, axes, size: int) -> jax.Array:
    """The masks of this device's part of a dimension, `size` coordinates, which the mesh `axes` (or None) shard."""
    return jax.lax.dynamic_slice_in_dim(mask, jax.lax.axis_index(axes) * size, size, 1) if axes else mask


def _digest_shard(words, masks: list) -> jax.Array:
    """uint32 [WORDS] of one shard. The rows R are all dimensions but the last one, C. Blocks of rows are first added to each
    other, element by element: on a CPU XLA vectorises this, but no sum over all elements."""
    if not words.size:
        return jnp.zeros(WORDS, jnp.uint32)
    w_RC = words.reshape(math.prod(words.shape[:-1]), words.shape[-1])
    *outer, columns_4C = masks
    rows_4R = jnp.zeros((WORDS, 1), jnp.uint32)
    for mask in outer:
        rows_4R = (rows_4R[:, :, None] + mask[:, None, :]).reshape(WORDS, -1)

    def terms(start, size):
        rows_4r = jax.lax.dynamic_slice_in_dim(rows_4R, start, size, 1)
        w_rC = jax.lax.dynamic_slice_in_dim(w_RC, start, size)
        return _mix(w_rC ^ (rows_4r[:, :, None] + columns_4C[:, None, :]))

    steps = 0 if words.size < SMALL else -(-words.size // (UNROLLED * BLOCK))
    size = w_RC.shape[0] // (UNROLLED * steps) if steps else 0
    done = steps * UNROLLED * size
    total_4 = jnp.sum(terms(done, w_RC.shape[0] - done), (1, 2), dtype=jnp.uint32)
    if done:

        def add(step, sums_4rC):
            return sums_4rC + sum(terms((step * UNROLLED + part) * size, size) for part in range(UNROLLED))

        sums_4rC = jnp.zeros((WORDS, size, w_RC.shape[1]), jnp.uint32)
        total_4 += jnp.sum(jax.lax.fori_loop(0, steps, add, sums_4rC), (1, 2), dtype=jnp.uint32)
    return total_4


def _mix(x):
    """triple32, a bijection of 32-bit words (Wellons, github.com/skeeto/hash-prospector): a change of any bits of x gives
    any difference of the result with a chance of about 2^-32."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 14)


@jax.jit
def _weak_sum_all(leaves: list) -> list:
    return [_weak_sum(leaf) for leaf in leaves]


def weak_sums(tree) -> dict[str, int]:
    """{path: sum} of the arrays of a tree, as earlier versions recorded it: the sum over elements of (bits times an odd
    number that depends on the element's index), modulo 2^32. It misses, for instance, an even number of changed signs."""
    leaves = by_path(tree)
    return {path: int(value) for path, value in zip(leaves, _weak_sum_all(list(leaves.values())), strict=True)}


def _weak_sum(x):
    bits = np.dtype(x.dtype).itemsize * 8
    words = jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)  # of each element in row-major order
    stride = 1
    for axis in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    odd = index * np.uint32(2 * 2654435761 % 2**32) + np.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)
