"""Attention masks, and other arguments that all attention kernels share."""

from typing import Generic, NamedTuple, TypeVar

import jax

SMALLEST_BAND = 32  # smaller matrix products cost more than they save


class Mask(NamedTuple):
    """Which keys a query sees, by the distance d = position of the query - position of the key."""

    causal: bool = True
    nearest: int = 0  # smallest visible distance; 1 hides the query's own position
    window: int = 0  # number of visible distances; 0: no limit

    def sees(self, distance):
        """Whether each distance is visible; None if all of them are."""
        if not self.causal:
            return None
        seen = distance >= self.nearest
        return seen & (distance < self.nearest + self.window) if self.window else seen

    @property
    def band(self) -> int:
        """A length, at least SMALLEST_BAND, that no visible distance exceeds; 0 without a causal window."""
        return max(self.window, SMALLEST_BAND) if self.causal and self.window else 0


T = TypeVar("T")
CAUSAL = Mask()
EVERYTHING = Mask(causal=False)


class Shaping(NamedTuple):
    """a, b, c per head: aI + bA - cC replaces the weights A, where C are uniform weights (He & Hofmann 2023, eq. 5)."""

    identity_H: jax.Array
    weights_H: jax.Array
    uniform_H: jax.Array | float


class Slots(NamedTuple, Generic[T]):
    """Persistent memory slots: keys and values that every query sees, without position or batch dimension. T: jax.Array, or
    the PartitionSpec of each array."""

    query: T | None  # [B, L, H, K], the queries for the slots; None: the same queries as for the tokens
    key: T  # [M, G, K]
    value: T  # [M, G, V]
    sink_H: T | None = None  # the logit of the only slot, whose key and value are zeros; None: slots as above

    def queries(self, q_BLHK):
        """The queries for the slots, given the queries for the tokens."""
        return q_BLHK if self.query is None else self.query


def visible(distance_LS, mask: Mask, segments):
    """Which keys each query sees, [B or 1, L, S]; None if it sees all.

    segments: the ids of queries [B, L], those of keys [B, S], and perhaps a third array [B, S], not 0 for the keys of a
    prefix, which all queries of their segment see (Raffel et al. 2020, fig. 3); or None."""
    seen = mask.sees(distance_LS)
    seen = None if seen is None else seen[None]
    if segments is not None:
        q_BL, k_BS, *prefix = segments
        same_BLS = q_BL[:, :, None] == k_BS[:, None, :]
        if prefix and seen is not None:
            seen = seen | (prefix[0] != 0)[:, None, :]
        seen = same_BLS if seen is None else seen & same_BLS
    return seen
