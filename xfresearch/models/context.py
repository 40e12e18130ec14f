"""What a forward pass carries besides activations and parameters: positions, segments, dropout keys, taps, mesh, cache."""

import zlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.models.partition import constrain
from xfresearch.models.taps import Taps


class Aux(NamedTuple):
    """What a layer says besides its output: each value is a sum over a sequence's tokens, padding left out."""

    losses: dict = {}  # {name: [B]}, added to the loss
    statistics: dict = {}  # {name: [B, ...]}, to look at

    def __or__(self, other: "Aux") -> "Aux":
        return Aux(self.losses | other.losses, self.statistics | other.statistics)


@dataclass(frozen=True)
class Context:
    """Read by every layer. `at` and `layer` derive the context of a place inside the model."""

    positions_BL: Any  # position of each token in its own document
    segments_BL: Any = None  # document of each token, 0 for padding; None: one document, no padding
    key: Any = None  # dropout key; None: no dropout
    taps: Taps | None = None
    place: str = ""
    cache_index: Any = 0  # where in the cache this call's first token goes
    cache_segments_BS: Any = None
    relative_key_RK: Any = None  # tables of positions that all layers share: a key for each distance,
    relative_bias_RH: Any = None  # a bias for each bucket of distances
    mesh: Any = None  # jax.sharding.Mesh or AbstractMesh that the arrays lie on; None: no constraints

    def layer(self, index) -> "Context":
        """The context of layer `index`: a Python integer when unrolled, traced when scanned (then without taps)."""
        key = None if self.key is None else jax.random.fold_in(self.key, index)
        return replace(self, key=key, place=f"blocks.{index}" if self.taps else "")

    def at(self, name: str) -> "Context":
        return replace(self, place=f"{self.place}.{name}") if self.taps else replace(self, place=name)

    def tap(self, name: str, value):
        """Lets a reader record or replace `value`; the identity otherwise."""
        return self.taps(f"{self.place}.{name}" if self.place else name, value) if self.taps else value

    def shard(self, x, letters: str):
        """x, its dimensions cut over the mesh as models/axes.py says for their letters."""
        return constrain(self.mesh, x, letters)

    def cuts(self, axis: str) -> bool:
        """Whether the mesh has more than one part along `axis`."""
        return self.mesh is not None and self.mesh.shape[axis] > 1

    def dropout(self, x, rate: float, site: str):
        """x with entries zeroed at `rate` and the rest scaled by 1/(1-rate); `site` tells the draws of a layer apart."""
        if not rate or self.key is None:
            return x
        keep = jax.random.bernoulli(self.dropout_key(site), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)

    def dropout_key(self, site: str):
        return None if self.key is None else jax.random.fold_in(self.key, zlib.crc32(site.encode()))
