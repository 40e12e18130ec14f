"""The inputs of a forward pass other than tokens and parameters: positions, segment ids, dropout keys, taps, mesh."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.models.taps import Taps
from xfresearch.sharding.partition import constrain


class Aux(NamedTuple):
    """Additional outputs of a layer. Losses and statistics are sums over the tokens of a sequence, without padding."""

    losses: dict = {}  # {name: [B]}, added to the loss
    statistics: dict = {}  # {name: [B, ...]}, without gradients; of a whole layer {sublayer: {name: [B, ...]}}
    carried: dict = {}  # new values of the stream by name (stream.py), for the sublayers and layers after this one
    captures: dict = {}  # of a whole layer: the recorded values of its taps, {site: value}


def add_losses(losses: dict, more: dict) -> dict:
    """The sums of losses of the same name."""
    return losses | {name: losses[name] + value if name in losses else value for name, value in more.items()}


class Source(NamedTuple):
    """The source of cross-attention: the tokens of another sequence, and later their encoding.

    segments_BS: ids that match those of the decoder's tokens, 0 for padding; None for one document, number 1, without
    padding. positions_BS: position of each token in its own document; None for 0, 1, ... x_BSW: the encoding, of the
    encoder's width W; None before the encoder has run.
    """

    tokens_BS: Any
    segments_BS: Any = None
    positions_BS: Any = None
    x_BSW: Any = None


SOURCE = {"source": "int32", "source_segments": "int32", "source_positions": "int32"}  # arrays [B, S] of a batch


def source_in(batch: Mapping[str, Any]) -> Source | None:
    """The source of a batch; None without."""
    return Source(*(batch[name] for name in SOURCE)) if "source" in batch else None


@dataclass(frozen=True)
class Execution:
    """How a model is computed. This does not change its function."""

    attention_kernel: str = "auto"
    expert_kernel: str = "auto"
    reach: tuple[tuple[str, int], ...] = ()  # (decoder's block, past tokens that its trained spans need)

    def reach_of(self, block: str) -> int:
        """The number of past tokens that a block's trained spans need; 0 if they need the whole window."""
        return dict(self.reach).get(block, 0)


AUTO = Execution()  # the fastest kernels that support the model


@dataclass(frozen=True)
class Context:
    """Passed to every layer. `layer` and `at` derive the context of a layer and of a sublayer."""

    positions_BL: Any  # position of each token in its own document
    segments_BL: Any = None  # segment ids, 0 for padding; None: one document, no padding
    key: Any = None  # dropout key; None: no dropout
    taps: Taps | None = None
    place: str = ""  # path of the sublayer in the layer: the first part of its sites
    block: str = ""  # name of the block's config
    number: Any = 0  # number of the layer; traced if layers are scanned
    cache_index: Any = 0  # position in the cache of the first token of this call
    cache_segments_BS: Any = None
    shared: Mapping[str, Any] = field(default_factory=dict)  # tables that all layers share, by name
    source: Source | None = None  # of a model with an encoder; None if caches have its keys and values
    prefix_BL: Any = None  # not 0 for the tokens of a prefix, which all tokens of their segment see; it needs segments
    cache_prefix_BS: Any = None  # the same of the tokens in the cache
    token_types_BL: Any = None  # type of each token, for models with a table of types; None: 0 for all
    carried: Mapping[str, Any] = field(default_factory=dict)  # values that travel between layers, by name (stream.py)
    mesh: Any = None  # jax.sharding.Mesh or AbstractMesh that the arrays are on; None: no constraints
    execution: Execution = AUTO

    def layer(self, number, block: str, taps: Taps | None = None) -> "Context":
        """The context of layer `number`: an int if layers are unrolled, traced if scanned."""
        key = None if self.key is None else jax.random.fold_in(self.key, number)
        return replace(self, key=key, block=block, number=number, taps=taps)

    def at(self, name: str) -> "Context":
        """The context of a sublayer, or of a part of one."""
        return replace(self, place=self._site(name))

    def tap(self, name: str, value):
        """`value`, which a tap may record or change."""
        return self.taps(self._site(name), value) if self.taps else value

    def wants(self, *names: str) -> bool:
        """Whether one of these values is recorded or changed: some are only computed then."""
        return self.taps is not None and any(self.taps.wants(self._site(name)) for name in names)

    def changes(self, name: str) -> bool:
        """Whether a patch changes this value, in any layer that shares the compiled body."""
        return self.taps is not None and self._site(name) in self.taps.patches

    def _site(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def shard(self, x, letters: str):
        """x, sharded over the mesh by the letters of its dimensions (sharding/letters.py)."""
        return constrain(self.mesh, x, letters)

    def shards(self, axis: str) -> bool:
        """Whether the mesh has more than one shard along `axis`."""
        return self.mesh is not None and self.mesh.shape[axis] > 1

    def dropout(self, x, rate: float, site: str):
        """x with entries zeroed at `rate`, the rest scaled by 1/(1-rate). `site` names the draw within a sublayer."""
        if not rate or self.key is None:
            return x
        keep = jax.random.bernoulli(self.dropout_key(site), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)

    def dropout_key(self, site: str):
        """A key for this layer, sublayer and site; None without dropout."""
        if self.key is None:
            return None
        return jax.random.fold_in(self.key, zlib.crc32(f"{self.place}.{site}".encode()))
