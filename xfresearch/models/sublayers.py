"""The sublayers of a model, for code outside of models/, whose only way into a block they are: `sublayers` of a ModelConfig,
and with parameters `sublayers` of a Transformer.

Names of sublayers are free. Code asks for a role, or for a capability that the options state (models/sublayer.py), never for
a name or a class.
"""

from dataclasses import dataclass

import jax
from flax import nnx

from xfresearch.models import layers
from xfresearch.models.block import Block, places
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.connections.connection import At, Connection
from xfresearch.models.layers import Layer
from xfresearch.models.layouts import Branch
from xfresearch.models.linear_terms import LinearTerm, linear_terms, matrix_of
from xfresearch.models.norms import NormSpec
from xfresearch.models.place import Place
from xfresearch.models.sublayer import SublayerConfig, SublayerModule


@dataclass(frozen=True)
class Sublayer:
    """A sublayer of one layer: where it is, what it does, how it is connected, and its options."""

    layer: Layer
    branch: Branch  # its entry in the layout
    place: Place
    block: BlockConfig  # the options of its block
    prefix: str = ""  # of the names of its stack's taps

    @property
    def name(self) -> str:
        return self.branch.name

    @property
    def role(self) -> str:
        """'mixer' or 'feed_forward'."""
        return self.branch.role

    @property
    def options(self) -> SublayerConfig:
        return self.place.options

    @property
    def connection(self) -> Connection:
        return self.branch.connection

    @property
    def path(self) -> str:
        """'blocks.3.attention' or 'encoder.blocks.3.attention', the first part of the names of its taps."""
        return f"{self.prefix}blocks.{self.layer.number}.{self.name}"

    @property
    def stack(self) -> str:
        """The name of its stack of layers in a Request and in captures: 'main' or 'encoder/main'."""
        return f"{self.prefix.replace('.', '/')}{self.layer.stack}"

    def norm(self, at: str) -> NormSpec | None:
        """Its norm at 'in', 'out' or 'post'; None without."""
        return self.block.norm_at(f"{self.name}_{at}") if at in self.branch.norms else None


@dataclass(frozen=True)
class Bound:
    """A sublayer with its parameters."""

    sublayer: Sublayer
    block: Block  # of its layer alone

    @property
    def module(self) -> SublayerModule:
        return getattr(self.block, self.sublayer.name)

    @property
    def at(self) -> At:
        """Where its connection stands in its stack."""
        return self.block.at(self.sublayer.branch, self.sublayer.layer.number)

    @property
    def connection(self) -> dict[str, jax.Array]:
        """The parameters of its connection, by name."""
        return self.block.connection(self.sublayer.branch)

    @property
    def terms(self) -> list[LinearTerm]:
        """Its linear terms."""
        return linear_terms(self.sublayer.options, {path: each.axes for path, each in self._variables().items()})

    def matrix(self, part: str) -> jax.Array | None:
        """The matrix that reads the stream in a part such as 'query', or the source in those of cross-attention, or that
        writes to the stream in 'output'; None without a matrix."""
        arrays = {path: each[...] for path, each in self._variables().items()}
        return matrix_of(f"{part}/kernel", arrays) if f"{part}/kernel" in arrays else None

    def _variables(self) -> dict[str, nnx.Variable]:
        return {"/".join(map(str, path)): each for path, each in nnx.to_flat_state(nnx.state(self.module))}


def sublayers(model, role: str = "", has: str = "", layer: int | None = None) -> list[Sublayer]:
    """The sublayers of all layers, or of one layer, in the order of computation: all, those of a role, or those with the
    capability `has` of SublayerConfig, such as 'memory_parts'."""
    of_block = {name: list(places(model.around, model.depth, block)) for name, block in model.blocks.items()}
    chosen = [
        Sublayer(at, branch, place, model.blocks[at.block], model.prefix)
        for at in (layers.layers(model) if layer is None else [layers.layer(model, layer)])
        for branch, place in of_block[at.block]
    ]
    return [each for each in chosen if role in ("", each.role) and (not has or getattr(each.options, has))]
