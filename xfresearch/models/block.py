"""A block: the one formula that all layouts share.

    y = skip * x + gain * dropout(out_norm(fn(in_norm(x))))      then      y = post_norm(y)

A block applies it for each sublayer of its layout (layouts.py), in order. The connection of a sublayer decides what it
reads, and what its output is added to.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from xfresearch.models import adapters
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.connections.connection import At
from xfresearch.models.context import Aux, Context, add_losses
from xfresearch.models.costs import Costs
from xfresearch.models.kinds import kind_of
from xfresearch.models.layouts import LAYOUTS, Branch, output_scale
from xfresearch.models.norms import Norm
from xfresearch.models.parameters import Rngs, parameter
from xfresearch.models.place import Place
from xfresearch.models.stream import Stream


def places(around: Place, depth: int, block: BlockConfig) -> Iterator[tuple[Branch, Place]]:
    """(branch, place) of each sublayer of a block. `around` has the settings that all places of the model share."""
    layout = LAYOUTS[block.layout]
    width = around.width
    for branch, options in zip(layout.branches, block.sublayers.values(), strict=True):
        place = replace(
            around,
            norm=block.norm_spec(),
            options=options,
            input_width=width,
            inner_scale=branch.connection.kernel_scale(depth),
            output_scale=output_scale(layout, depth, branch),
            bare=branch.bare,
            source_width=around.source_width if branch.role == "cross" else 0,
        )
        yield branch, place
        unread = branch.connection.adds_to == "nothing"
        width = kind_of(options).module.output_width(place) if unread else around.width


class Block(nnx.Module):
    def __init__(self, around: Place, depth: int, block: BlockConfig, rngs, number=0):
        """`number` is that of the layer in the model; it may be traced."""
        self.layout = LAYOUTS[block.layout]
        self.dropout = block.dropout
        self.width, self.depth = around.width, depth
        gain = getattr(block, "branch_gain", 0.0)
        for i, (branch, place) in enumerate(places(around, depth, block)):
            setattr(self, branch.name, kind_of(place.options).module(place, rngs))
            at = self.layout.at(place.width, depth, number, i)
            initials = branch.connection.parameters(at, gain, place.param_dtype)
            for name, initial in initials.items():
                setattr(self, f"{branch.name}_{name}", parameter(*initial))
            for site in branch.norms:
                norm = Norm(block.norm_at(f"{branch.name}_{site}"), "D", (place.width,), place.param_dtype)
                setattr(self, f"{branch.name}_norm_{site}", norm)

    def __call__(self, stream: Stream, ctx: Context, cache: dict | None = None):
        """The stream after the block, the caches of its sublayers by name, and the additional outputs."""
        block_BLD = read_BLD = None
        block = adapters.added_up(self)
        caches: dict = {}
        losses: dict = {}
        statistics: dict = {}
        for branch in self.layout.branches:
            name, connection, parameters = branch.name, branch.connection, self.connection(branch)
            at = self.at(branch, ctx.number)
            inner = replace(ctx.at(name), carried=stream.values)
            stream = connection.put(at, stream, inner.tap("before", stream.x_BLD))
            block_BLD = stream.x_BLD if block_BLD is None else block_BLD
            if connection.reads != "before":
                read_BLD = connection.read(at, parameters, stream) if connection.reads == "stream" else block_BLD
            read_BLD = inner.tap("in", self._norm(branch, "in", read_BLD))
            y_BLD, caches[name], aux = getattr(block, name)(read_BLD, inner, cache and cache[name])
            stream = stream._replace(values={**stream.values, **aux.carried})
            y_BLD = self._norm(branch, "out", inner.tap("raw", y_BLD))
            y_BLD = inner.dropout(y_BLD, self.dropout, "out")
            y_BLD = inner.tap("out", connection.scaled(at, parameters, y_BLD))
            stream = connection.write(at, parameters, stream, block_BLD, y_BLD)
            stream = _tapped(connection, at, stream, inner)
            if "post" in branch.norms:
                stream = connection.put(at.after, stream, self._norm(branch, "post", inner.tap("sum", stream.x_BLD)))
            stream = stream._replace(x_BLD=ctx.shard(stream.x_BLD, "BLD"))
            stream = connection.put(at.after, stream, inner.tap("residual", stream.x_BLD))
            losses = add_losses(losses, aux.losses)
            statistics |= {name: aux.statistics} if aux.statistics else {}
        return stream, caches, Aux(losses, statistics, captures=ctx.taps.leaving() if ctx.taps else {})

    def connection(self, branch: Branch) -> dict:
        """The parameters of a sublayer's connection, by name."""
        return {name: getattr(self, f"{branch.name}_{name}")[...] for name in branch.connection.parameter_names}

    def at(self, branch: Branch, layer) -> At:
        """The place of a sublayer if this is the block of `layer`."""
        return self.layout.at(self.width, self.depth, layer, self.layout.branches.index(branch))

    def norm(self, branch: Branch, at: str) -> Norm | None:
        """The norm of a sublayer at 'in', 'out' or 'post'; None without."""
        return getattr(self, f"{branch.name}_norm_{at}", None)

    def _norm(self, branch: Branch, at: str, x_BLD):
        norm = self.norm(branch, at)
        return x_BLD if norm is None else norm(x_BLD)

    def init_cache(self, batch: int, length: int, ctx: Context | None = None) -> dict:
        """Caches by sublayer, empty except for the keys and values of the source of `ctx`."""
        block = adapters.added_up(self)
        caches = {each.name: getattr(block, each.name).init_cache(batch, length) for each in self.layout.branches}
        if ctx is None or ctx.source is None:
            return caches
        of_source = {name: getattr(block, name).source_cache(ctx.at(name)) for name in caches}
        return {name: cache | of_source[name] for name, cache in caches.items()}

    @staticmethod
    def costs(around: Place, depth: int, block: BlockConfig, length: int) -> Costs:
        total = Costs()
        for branch, place in places(around, depth, block):
            at = LAYOUTS[block.layout].at(place.width, depth)
            total += kind_of(place.options).module.costs(place, length) + branch.connection.costs(at)
            for site in branch.sites:
                total += block.norm_at(site).costs(place.width)
        return total


def _tapped(connection, at: At, stream: Stream, ctx: Context) -> Stream:
    """The stream after the taps of the values that the connection carries."""
    forms = connection.carried(at)
    values = {name: ctx.shard(stream.values[name], form.letters) for name, form in forms.items()}
    values = {name: ctx.tap(name, value) if forms[name].tap else value for name, value in values.items()}
    return connection.carry(at, stream, values)


def make_block(stack: Any, name: str, key, number=0) -> Block:
    """A new block of this name of a stack (StackConfig), with its adapters, for the layer `number`."""
    block = Block(stack.around, stack.depth, stack.blocks[name], Rngs(key), number)
    adapters.attach(block, stack.adapter, _prefix(stack, name), key)
    return block


def abstract_block(stack: Any, name: str) -> Block:
    """The same with the shapes of its parameters alone."""
    block: Block = nnx.eval_shape(partial(make_block, stack, name), jax.random.key(0))
    return block


def matrix_paths(stack: Any) -> list[str]:
    """The paths of the matrices of all blocks of a stack, which the targets of adapters are matched with: those of its
    parameters, but that stacks of one block have the block's name."""
    return [
        _prefix(stack, name) + path
        for name in stack.blocks
        for path, *_ in adapters.matrices(abstract_block(stack, name))
    ]


def _prefix(stack: Any, name: str) -> str:
    return f"{stack.prefix.replace('.', '/')}blocks/{name}/"
