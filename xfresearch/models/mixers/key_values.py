"""The cache of keys and values of softmax attention: {"key": [B, G, S, K], "value": [B, G, S, V]}.

A step of decoding writes one token into each array and reads all of it. The layout lets XLA on CPU do so without a copy
of the cache: heads come before tokens, as in the products of attention, and B, G, K and V are left out where they are 1.
A cache without "value" has keys that are the values too.
"""

import jax
import jax.numpy as jnp

LENGTH = 2  # the dimension S, which is never left out


def empty(shapes: dict[str, tuple[int, int]], batch: int, length: int, dtype: str) -> dict:
    """The cache for `length` tokens of each of `batch` sequences. `shapes` are those of a token's entries: heads, size."""
    return {name: jnp.zeros(_kept((batch, heads, length, size)), dtype) for name, (heads, size) in shapes.items()}


def extended(cache: dict, k_BLGK, v_BLGV, index) -> dict:
    """`cache` with the keys and values written at positions from `index` on."""
    new = {name: x.swapaxes(1, LENGTH) for name, x in (("key", k_BLGK), ("value", v_BLGV)) if name in cache}
    return cache | {name: _written(cache[name], x_BGLK, index) for name, x_BGLK in new.items()}


def read(cache: dict, k_BLGK, v_BLGV):
    """All keys and values, k_BSGK and v_BSGV; the new ones have their shapes, but for the length."""
    return _read(cache["key"], k_BLGK), _read(cache.get("value", cache["key"]), v_BLGV)


def _written(stored, x_BGLK, index):
    start = [index if dimension == LENGTH else 0 for dimension in _dimensions(x_BGLK.shape)]
    return jax.lax.dynamic_update_slice(stored, x_BGLK.astype(stored.dtype).reshape(_kept(x_BGLK.shape)), start)


def _read(stored, x_BLGK):
    B, _, G, K = x_BLGK.shape
    return stored.reshape(B, G, -1, K).swapaxes(1, LENGTH)


def _kept(shape_BGSK: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape_BGSK[dimension] for dimension in _dimensions(shape_BGSK))


def _dimensions(shape_BGSK: tuple[int, ...]) -> list[int]:
    """The dimensions that are stored."""
    return [i for i, size in enumerate(shape_BGSK) if i == LENGTH or size > 1]
