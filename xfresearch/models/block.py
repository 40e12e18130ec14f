"""A block: the one formula that all layouts share.

    y = skip * x + gain * dropout(out_norm(fn(in_norm(x))))      then      y = post_norm(y)

A block applies it for each sublayer of its layout (layouts.py), in order. The layout decides what a sublayer reads, and
what its output is added to: the residual stream, or the input of the block.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.kinds import kind_of
from xfresearch.models.layouts import LAYOUTS, Sublayer, first_gain, inner_scale, output_scale, skip_scale
from xfresearch.models.norms import Norm
from xfresearch.models.parameters import parameter, times
from xfresearch.models.place import Place


class Stream(NamedTuple):
    """The residual stream between blocks and, in a model with a dual layout, the sum of all sublayer outputs."""

    x_BLD: jax.Array
    sum_BLD: jax.Array | None = None


def places(around: Place, depth: int, block: BlockConfig) -> Iterator[tuple[Sublayer, Place]]:
    """Each sublayer of a block, and its place. `around` is the place that all blocks of the model have in common."""
    layout = LAYOUTS[block.layout]
    width = around.width
    for sublayer, options in zip(layout.sublayers, block.sublayers.values(), strict=True):
        place = replace(
            around,
            norm=block.norm_spec(),
            options=options,
            input_width=width,
            inner_scale=inner_scale(layout, depth),
            output_scale=output_scale(layout, depth, sublayer),
            bare=sublayer.bare,
        )
        yield sublayer, place
        width = kind_of(options).module.output_width(place) if sublayer.skip == "none" else around.width


class Block(nnx.Module):
    def __init__(self, around: Place, depth: int, block: BlockConfig, rngs):
        self.layout = LAYOUTS[block.layout]
        self.dropout = block.dropout
        self.skip_scale = skip_scale(self.layout, depth)
        for sublayer, place in places(around, depth, block):
            setattr(self, sublayer.name, kind_of(place.options).module(place, rngs))
            if sublayer.gain:
                first = first_gain(sublayer, depth, getattr(block, "branch_gain", 0.0))
                setattr(self, f"{sublayer.name}_gain", parameter(jnp.full((), first, place.param_dtype), ""))
            if sublayer.skip_gain:
                setattr(self, f"{sublayer.name}_skip_gain", parameter(jnp.ones((), place.param_dtype), ""))
            for at in sublayer.norms:
                norm = Norm(block.norm_at(f"{sublayer.name}_{at}"), "D", (place.width,), place.param_dtype)
                setattr(self, f"{sublayer.name}_norm_{at}", norm)

    def __call__(self, stream: Stream, ctx: Context, cache: dict | None = None):
        """The stream after the block, the caches of its sublayers by name, and auxiliary losses and statistics."""
        x_BLD, sum_BLD = stream
        sources, caches = {}, {}
        aux = Aux()
        for sublayer in self.layout.sublayers:
            name = sublayer.name
            inner = ctx.at(name)
            sources["stream"] = x_BLD = inner.tap("before", x_BLD)
            sources.setdefault("block", x_BLD)
            sources["before"] = inner.tap("in", self._norm(name, "in", sources[sublayer.reads]))
            y_BLD, caches[name], new_aux = getattr(self, name)(sources["before"], inner, cache and cache[name])
            y_BLD = self._norm(name, "out", inner.tap("raw", y_BLD))
            y_BLD = inner.dropout(y_BLD, self.dropout, "out")
            if sublayer.gain:
                y_BLD = times(y_BLD, getattr(self, f"{name}_gain")[...])
            y_BLD = inner.tap("out", y_BLD)
            x_BLD = y_BLD if sublayer.skip == "none" else self._skip(sublayer, sources[sublayer.skip]) + y_BLD
            if sum_BLD is not None and not sublayer.bare:
                sum_BLD = inner.tap("dual", sum_BLD + y_BLD)
            if "post" in sublayer.norms:
                x_BLD = self._norm(name, "post", inner.tap("sum", x_BLD))
            x_BLD = inner.tap("residual", ctx.shard(x_BLD, "BLD"))
            aux |= new_aux
        return Stream(x_BLD, sum_BLD), caches, aux

    def _skip(self, sublayer: Sublayer, x_BLD):
        """The scaled skip, to which the sublayer's output is added."""
        if sublayer.skip_gain:
            return times(x_BLD, getattr(self, f"{sublayer.name}_skip_gain")[...])
        return self.skip_scale * x_BLD

    def _norm(self, sublayer: str, at: str, x_BLD):
        norm = getattr(self, f"{sublayer}_norm_{at}", None)
        return x_BLD if norm is None else norm(x_BLD)

    def init_cache(self, batch: int, length: int) -> dict:
        return {s.name: getattr(self, s.name).init_cache(batch, length) for s in self.layout.sublayers}

    @staticmethod
    def costs(around: Place, depth: int, block: BlockConfig, length: int) -> Costs:
        total = Costs()
        for sublayer, place in places(around, depth, block):
            total += kind_of(place.options).module.costs(place, length)
            total += weights(bool(sublayer.gain) + sublayer.skip_gain)
            for site in sublayer.sites:
                total += block.norm_at(site).costs(place.width)
        return total
