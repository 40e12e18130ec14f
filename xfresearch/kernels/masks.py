"""Attention masks, and the other arguments that all implementations of attention share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SMALLEST_BAND = 32  # smaller matrix products waste more than they save


class Mask(NamedTuple):
    """Which distances d = position of the query - position of the key are visible."""

    causal: bool = True
    nearest: int = 0  # 1: all but itself
    window: int = 0  # how many distances; 0: all

    def sees(self, distance):
        if not self.causal:
            return None
        seen = distance >= self.nearest
        return seen & (distance < self.nearest + self.window) if self.window else seen

    @property
    def band(self) -> int:
        """A length that no distance exceeds, at least SMALLEST_BAND; 0 where there is none."""
        return max(self.window, SMALLEST_BAND) if self.causal and self.window else 0


CAUSAL = Mask()
EVERYTHING = Mask(causal=False)


class Shaping(NamedTuple):
    """aI + bA - cC in place of the weights A, C being the uniform ones (He & Hofmann 2023, eq. 5): a number per head."""

    identity_H: jax.Array
    weights_H: jax.Array
    uniform_H: jax.Array | float


class Slots(NamedTuple):
    """Persistent memory slots: keys and values that every query sees, without position or batch dimension."""

    query: jax.Array | None  # [B, L, H, K], the queries that meet the slots; None: those that meet the tokens
    key: jax.Array  # [M, G, K]
    value: jax.Array  # [M, G, V]

    def met_by(self, q_BLHK):
        """The queries that meet the slots, where `q` meets the tokens."""
        return q_BLHK if self.query is None else self.query


def visible(distance_LS, mask: Mask, segments):
    """Which keys each query sees: [B or 1, L, S], or None where it sees all. segments: of queries and of keys, or None."""
    seen = mask.sees(distance_LS)
    seen = None if seen is None else seen[None]
    if segments is not None:
        same_BLS = segments[0][:, :, None] == segments[1][:, None, :]
        seen = same_BLS if seen is None else seen & same_BLS
    return seen


def softmax_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)
