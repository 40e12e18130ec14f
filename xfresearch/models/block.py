"""A block: the layout formula, in one place.

    y = skip * x + gain * dropout(out_norm(fn(in_norm(x))))      then      y = post_norm(y)

for each sublayer of the block's layout (layouts.py) in turn. Where a sublayer reads and what it is added to is the
layout's to say: the stream so far, or the block's own input.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import BlockConfig, ModelConfig
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.layouts import LAYOUTS, Sublayer, first_gain, norm_kind, site_block, skip_scale
from xfresearch.models.linear import times
from xfresearch.models.norms import Norm
from xfresearch.models.variants import ATTENTIONS, FEED_FORWARDS, load


class Stream(NamedTuple):
    """What goes from block to block: x, and in a model with a dual layout the sum of all that sublayers have written."""

    x_BLD: jax.Array
    sum_BLD: jax.Array | None = None


def sublayer_class(name: str, block: BlockConfig):
    """The module that computes a sublayer: called as fn(x_BLD, ctx, cache) -> (y_BLD, cache, Aux)."""
    return load(ATTENTIONS[block.attention.kind] if name == "attention" else FEED_FORWARDS[block.feed_forward.kind])


class Block(nnx.Module):
    def __init__(self, model: ModelConfig, block: BlockConfig, rngs):
        self.layout, self.dropout, self.skip_scale = LAYOUTS[block.layout], block.dropout, skip_scale(model, block)
        for sublayer in self.layout.sublayers:
            setattr(self, sublayer.name, sublayer_class(sublayer.name, block)(model, block, rngs))
            if sublayer.gain:
                gain = jnp.full((), first_gain(model, block, sublayer), model.param_dtype)
                setattr(self, f"{sublayer.name}_gain", nnx.Param(gain))
            if sublayer.skip_gain:
                setattr(self, f"{sublayer.name}_skip_gain", nnx.Param(jnp.ones((), model.param_dtype)))
            for place in sublayer.norms:
                kind = norm_kind(block, sublayer.name, place)
                at = site_block(block, sublayer.name, place)
                setattr(self, f"{sublayer.name}_norm_{place}", Norm(model, kind, at))

    def __call__(self, stream: Stream, ctx: Context, cache: dict | None = None):
        """The stream after the block, the caches of its sublayers by name, and their auxiliary losses and statistics."""
        x_BLD, sum_BLD = stream
        sources, caches, aux = {"block": x_BLD}, {}, Aux()
        for sublayer in self.layout.sublayers:
            name, place = sublayer.name, ctx.at(sublayer.name)
            sources["stream"] = x_BLD
            sources["before"] = place.tap("in", self._norm(name, "in", sources[sublayer.reads]))
            y_BLD, caches[name], more = getattr(self, name)(sources["before"], place, cache and cache[name])
            y_BLD = place.dropout(self._norm(name, "out", y_BLD), self.dropout, name)
            if sublayer.gain:
                y_BLD = times(y_BLD, getattr(self, f"{name}_gain")[...])
            y_BLD = place.tap("out", y_BLD)
            x_BLD = y_BLD if sublayer.skip == "none" else self._skip(sublayer, sources[sublayer.skip]) + y_BLD
            if sum_BLD is not None and not (self.layout.fused and name == "attention"):
                sum_BLD = sum_BLD + y_BLD
            x_BLD = place.tap("residual", ctx.shard(self._norm(name, "post", x_BLD), "BLD"))
            aux |= more
        return Stream(x_BLD, sum_BLD), caches, aux

    def _skip(self, sublayer: Sublayer, x_BLD):
        """What the sublayer's output is added to."""
        if sublayer.skip_gain:
            return times(x_BLD, getattr(self, f"{sublayer.name}_skip_gain")[...])
        return self.skip_scale * x_BLD

    def _norm(self, sublayer: str, place: str, x_BLD):
        norm = getattr(self, f"{sublayer}_norm_{place}", None)
        return x_BLD if norm is None else norm(x_BLD)

    def init_cache(self, batch: int, length: int) -> dict:
        return {s.name: getattr(self, s.name).init_cache(batch, length) for s in self.layout.sublayers}

    @staticmethod
    def costs(model: ModelConfig, block: BlockConfig, length: int) -> Costs:
        total = Costs()
        for sublayer in LAYOUTS[block.layout].sublayers:
            total += sublayer_class(sublayer.name, block).costs(model, block, length)
            total += weights(bool(sublayer.gain) + sublayer.skip_gain)
            for place in sublayer.norms:
                kind, at = norm_kind(block, sublayer.name, place), site_block(block, sublayer.name, place)
                total += Norm.costs(model.width, kind, at)
        return total
