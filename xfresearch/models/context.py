"""What a forward pass carries besides activations and parameters: positions, segments, dropout keys, taps, mesh, cache."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.models.taps import Taps
from xfresearch.sharding.partition import constrain


class Aux(NamedTuple):
    """What a layer returns besides its output: each value is a sum over a sequence's tokens, padding left out."""

    losses: dict = {}  # {name: [B]}, added to the loss
    statistics: dict = {}  # {name: [B, ...]}, reported, not trained on

    def __or__(self, other: "Aux") -> "Aux":
        return Aux(self.losses | other.losses, self.statistics | other.statistics)


@dataclass(frozen=True)
class Execution:
    """How a model is computed, which does not change its function."""

    attention_kernel: str = "auto"
    expert_kernel: str = "auto"
    reach: tuple[tuple[str, int], ...] = ()  # (block, tokens back that its trained spans need)

    def reach_of(self, block: str) -> int:
        """Tokens back that a block's trained spans need; 0 where they need the whole window."""
        return dict(self.reach).get(block, 0)


@dataclass(frozen=True)
class Context:
    """Read by every layer. `at` and `layer` derive the context of a place inside the model."""

    positions_BL: Any  # position of each token in its own document
    segments_BL: Any = None  # document of each token, 0 for padding; None: one document, no padding
    key: Any = None  # dropout key; None: no dropout
    taps: Taps | None = None
    place: str = ""  # of the layer or sublayer that reads this context, as taps name it
    block: str = ""  # name of the block's config
    cache_index: Any = 0  # where in the cache this call's first token goes
    cache_segments_BS: Any = None
    shared: Mapping[str, Any] = field(default_factory=dict)  # tables that all layers share, by name
    mesh: Any = None  # jax.sharding.Mesh or AbstractMesh that the arrays are on; None: no constraints
    execution: Execution = Execution()

    def layer(self, index, block: str) -> "Context":
        """The context of layer `index`: a Python integer when unrolled, traced when scanned (then without taps)."""
        key = None if self.key is None else jax.random.fold_in(self.key, index)
        return replace(self, key=key, block=block, place=f"blocks.{index}" if self.taps else "")

    def at(self, name: str) -> "Context":
        """The context of a sublayer, or of a part of one."""
        return replace(self, place=f"{self.place}.{name}" if self.place else name)

    def tap(self, name: str, value):
        """Lets a reader record or replace `value`; the identity otherwise."""
        return self.taps(f"{self.place}.{name}" if self.place else name, value) if self.taps else value

    def shard(self, x, letters: str):
        """x, sharded over the mesh as sharding/letters.py says for the letters of its dimensions."""
        return constrain(self.mesh, x, letters)

    def shards(self, axis: str) -> bool:
        """Whether the mesh has more than one part along `axis`."""
        return self.mesh is not None and self.mesh.shape[axis] > 1

    def dropout(self, x, rate: float, site: str):
        """x with entries zeroed at `rate` and the rest scaled by 1/(1-rate); `site` names the draw within its sublayer."""
        if not rate or self.key is None:
            return x
        keep = jax.random.bernoulli(self.dropout_key(site), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)

    def dropout_key(self, site: str):
        """A key of this layer, this sublayer and this site alone; None without dropout."""
        if self.key is None:
            return None
        # Taps put the layer's number in front of the place; the layer's key has it already.
        sublayer = self.place.split(".", 2)[-1] if self.place.startswith("blocks.") else self.place
        return jax.random.fold_in(self.key, zlib.crc32(f"{sublayer}.{site}".encode()))
