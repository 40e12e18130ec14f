"""A stack of blocks, from a residual stream of width D to a residual stream of width D.

It is separate from the language model (transformer.py), so that a model can have two of them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.models import adapters, layers
from xfresearch.models.block import Block, abstract_block, make_block, places
from xfresearch.models.block_config import BLOCKS, BlockConfig
from xfresearch.models.connections.connection import At, Connection
from xfresearch.models.context import Context, add_losses
from xfresearch.models.costs import Costs, weights
from xfresearch.models.kinds import kind_of
from xfresearch.models.layouts import LAYOUTS, Branch
from xfresearch.models.parameters import parameter
from xfresearch.models.place import Place
from xfresearch.models.stream import Carried, Stream
from xfresearch.models.sublayer import SharedTable
from xfresearch.models.sublayers import Sublayer, sublayers
from xfresearch.models.taps import Request
from xfresearch.options.fields import choice, choices, option, where
from xfresearch.runtime.errors import nearest, require
from xfresearch.sharding.partition import constrain_parameters

S = TypeVar("S", bound="StackConfig")
REMAT = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


@dataclass(frozen=True)
class StackOptions:
    """The options of one stack of blocks."""

    width: int = option(256, "width D of the residual stream", low=1)
    depth: int = option(4, "number of layers N, a multiple of the pattern's length", low=1, high=10_000)
    max_length: int = option(0, "length that positions, spans and capacities are for; 0 for sequence_length", low=0)
    pattern: tuple[str, ...] = option(("main",), "names of blocks, repeated up to the depth")
    segments: tuple[tuple[tuple[str, ...], int], ...] = option(
        (),
        "((pattern, repeats), ...) instead of one pattern, if the first or the last layers differ; one segment may "
        "have 0 repeats, and then fills the depth",
    )
    blocks: dict[str, BlockConfig] = choices(BLOCKS, {"main": "pre_norm"}, "blocks by name", "layout")
    causal: bool = option(
        True, "a position sees only itself and earlier positions; False is for labels and masked tokens (docs/objectives.md)"
    )


@dataclass(frozen=True)
class NumberOptions:
    """The initial values, the dtypes and the adapters of all parameters of a model."""

    init: Literal["fan_in", "normal"] = option(
        "fan_in",
        "standard deviation of initial kernels, 1/sqrt(inputs), and embeddings, 1/sqrt(width); or init_std for both",
        decides="initialisation",
    )
    init_std: float = option(
        0.02, "standard deviation with init = 'normal'", above=0.0, decides="initialisation", needs=where(init="normal")
    )
    dtype: Literal["float32", "bfloat16", "float64"] = option(
        "float32", "dtype of the computation", decides="precision"
    )
    param_dtype: Literal["float32", "float64"] = option("float32", "dtype of the parameters", decides="precision")
    adapter: Any = choice(adapters.ADAPTERS, "none", "what is trained beside frozen matrices of the blocks")


@dataclass(frozen=True)
class StackConfig(NumberOptions, StackOptions):
    """A stack of blocks with all that its parameters and its function depend on."""

    def __hash__(self):  # `blocks` is a dict, which has no hash; equal configs have equal representations
        return hash(repr(self))

    @property
    def key(self) -> str:
        """The path of its options in the config, for errors."""
        return "model"

    @property
    def prefix(self) -> str:
        """What the names of its taps begin with."""
        return ""

    @property
    def source_width(self) -> int:
        """The width of the source that its blocks can read; 0 without a source."""
        return 0

    @property
    def source_length(self) -> int:
        """The length of the source, for costs."""
        return 0

    @property
    def around(self) -> Place:
        """The settings that the places of all sublayers of the stack share."""
        init_std = self.init_std if self.init == "normal" else 0.0
        sizes = self.width, self.max_length, self.causal, self.dtype, self.param_dtype, init_std
        return Place(*sizes, source_width=self.source_width, source_length=self.source_length)

    def sublayers(self, role: str = "", has: str = "", layer: int | None = None) -> list[Sublayer]:
        """The sublayers of all layers, or of one layer, in the order of computation: all, those of a role ('mixer' or
        'feed_forward'), or those with the capability `has` (SublayerConfig). Raises UserError for an unknown layer.

        This is the way into a block from outside of models/."""
        return sublayers(self, role, has, layer)

    def places(self):
        """(name of the block, the layout's Branch, its Place) of every sublayer of every block."""
        for name, block in self.blocks.items():
            for branch, place in places(self.around, self.depth, block):
                yield name, branch, place


def resolved(stack: S) -> S:
    """A stack's config with derived sizes filled in. Raises UserError at the first invalid option."""
    stack = _with_repeats(stack)
    names = list(dict.fromkeys(name for pattern, _ in layers.segments(stack) for name in pattern))
    for name in stack.blocks:
        require(name in names, f"{stack.key}.blocks", name, f"a block that {stack.key}.pattern or .segments uses: {names}")
    for name, count in Counter(place.name for place in layers.stacks(stack)).items():
        allowed = "another name: the pattern repeats a block, and one of its stacks has this name"
        require(count == 1, f"{stack.key}.blocks", name, allowed)
    blocks = {name: _resolved_block(block, stack, f"{stack.key}.blocks.{name}") for name, block in stack.blocks.items()}
    stack = replace(stack, blocks=blocks)
    require(
        not (stack.dtype == "float64" and stack.param_dtype != "float64"),
        "model.param_dtype",
        stack.param_dtype,
        "float64 if model.dtype is float64",
    )
    shared_tables(stack)
    carried(stack)
    return stack


def _with_repeats(stack: S) -> S:
    """The stack with the repeats of all segments, which must add up to the depth."""
    blocks = stack.blocks
    depth = stack.depth
    if not stack.segments:
        require(len(stack.pattern) > 0, f"{stack.key}.pattern", stack.pattern, "at least one block name")
        count = len(stack.pattern)
        require(depth % count == 0, f"{stack.key}.depth", depth, f"a multiple of the {count} blocks in {stack.key}.pattern")
        _check_names(stack.pattern, blocks, f"{stack.key}.pattern", stack.pattern)
        return stack
    default = StackConfig.__dataclass_fields__["pattern"].default
    allowed = f"{default!r}, its default, with {stack.key}.segments"
    require(stack.pattern == default, f"{stack.key}.pattern", stack.pattern, allowed)
    for pattern, repeats in stack.segments:
        require(len(pattern) > 0, f"{stack.key}.segments", stack.segments, "patterns with at least one block name")
        _check_names(pattern, blocks, f"{stack.key}.segments", stack.segments)
        require(repeats >= 0, f"{stack.key}.segments", stack.segments, "patterns with repeats of at least 0")
    known = sum(len(pattern) * repeats for pattern, repeats in stack.segments)
    open_lengths = [len(pattern) for pattern, repeats in stack.segments if not repeats]
    allowed = "segments of which at most one has 0 repeats (it fills the depth)"
    require(len(open_lengths) <= 1, f"{stack.key}.segments", stack.segments, allowed)
    left = depth - known
    fits = left % open_lengths[0] == 0 and left > 0 if open_lengths else left == 0
    require(fits, f"{stack.key}.depth", depth, f"the number of layers in {stack.key}.segments={stack.segments}")
    segments = tuple((pattern, repeats or left // len(pattern)) for pattern, repeats in stack.segments)
    return replace(stack, segments=segments)


def _check_names(pattern: tuple, blocks: dict, key: str, value) -> None:
    for name in (name for name in pattern if name not in blocks):
        require(False, key, value, f"names of blocks: {', '.join(blocks)}" + nearest(name, blocks))


def _resolved_block(block: BlockConfig, stack: StackConfig, key: str) -> BlockConfig:
    """A block with the derived sizes of its sublayers."""
    # In order: the input width of a sublayer may be the output width of the sublayer before.
    for number in range(len(block.sublayers)):
        branch, place = [*_places_until(stack, block, number)][-1]
        options = place.options.resolved(place, f"{key}.{branch.name}")
        block = replace(block, **{branch.name: options})
    return block


def _places_until(stack: StackConfig, block: BlockConfig, number: int):
    """The sublayers of a block up to sublayer `number`. Later ones may not be resolved yet."""
    for i, place in enumerate(places(stack.around, stack.depth, block)):
        yield place
        if i == number:
            return


def shared_tables(stack: StackConfig) -> dict[str, SharedTable]:
    """The tables that all layers share. Raises UserError if blocks need different shapes of a table."""
    tables: dict[str, SharedTable] = {}
    for name, branch, place in stack.places():
        for table_name, table in kind_of(place.options).module.shared_tables(place).items():
            other = tables.get(table_name, table)
            key = f"{stack.key}.blocks.{name}.{branch.name}"
            same = table.shape == other.shape or table.grows and table.shape[1:] == other.shape[1:]
            allowed = f"of the same shape in all blocks: all layers share the table; another block has {other.shape}"
            require(same, key, f"{table_name} {table.shape}", allowed)
            tables[table_name] = max(table, other, key=lambda t: t.shape[0])
    return tables


def longest_input(stack: StackConfig) -> int:
    """The longest sequence that all sublayers support; 0 for any."""
    return max((kind_of(place.options).module.longest_input(place) for _, _, place in stack.places()), default=0)


def carried(stack: StackConfig) -> dict[str, Carried]:
    """The values that travel between layers. Raises UserError if blocks need different forms of a value."""
    forms: dict[str, Carried] = {}
    for name, branch, place in stack.places():
        declared = branch.connection.carried(first_place(stack, name)) | kind_of(place.options).module.carried(place)
        for value, form in declared.items():
            allowed = f"of the same shape in all blocks, between which it travels; another block has {forms.get(value)}"
            same = forms.setdefault(value, form) == form
            require(same, f"{stack.key}.blocks.{name}.{branch.name}", f"{value} {form.sizes}", allowed)
    return forms


def first_stream(stack: StackConfig, x_BLD, ctx: Context) -> Stream:
    """The stream before the first layer, given the embedding."""
    values = {
        name: ctx.shard(form.before_the_first_layer(x_BLD), form.letters) for name, form in carried(stack).items()
    }
    return Stream(x_BLD, values)


def last_branch(stack: StackConfig) -> Branch:
    """The layout's last sublayer in the last layer. Its connection decides what the head reads."""
    return LAYOUTS[stack.blocks[layers.stacks(stack)[-1].block].layout].branches[-1]


def end(stack: StackConfig) -> tuple[Connection, At]:
    """The connection that decides what the head reads, and its place after the last sublayer."""
    at = first_place(stack, layers.stacks(stack)[-1].block)
    return last_branch(stack).connection, at._replace(number=at.sublayers)


def first_place(stack: StackConfig, block: str) -> At:
    """The place before all sublayers of a stack that begins with this block."""
    return LAYOUTS[stack.blocks[block].layout].at(stack.width, stack.depth)


def ends_with(stack: StackConfig) -> tuple[str, ...]:
    """The names of the values that the head reads, such as ResiDual's second stream; () if it reads the residual stream
    alone."""
    return last_branch(stack).connection.ends_with


def end_formula(stack: StackConfig) -> str:
    """What the head reads, where x is the residual stream and norm the final norm."""
    return last_branch(stack).connection.end_formula


def layer_ends(stack: StackConfig) -> list[str]:
    """The name of the last sublayer of each layer, as in 'blocks.0.feed_forward'."""
    blocks = {name: LAYOUTS[block.layout].branches[-1].name for name, block in stack.blocks.items()}
    return [f"blocks.{layer.number}.{blocks[layer.block]}" for layer in layers.layers(stack)]


class SharedTables(nnx.Module):
    """The tables that all layers share, by name."""

    def __init__(self, stack: StackConfig, rngs):
        for name, table in shared_tables(stack).items():
            drawn = jax.random.normal(rngs.params(), table.shape, jnp.dtype(stack.param_dtype)) if table.drawn else None
            value = jnp.zeros(table.shape, stack.param_dtype) if drawn is None else drawn
            setattr(self, name, parameter(value, table.letters))

    def values(self) -> dict:
        return {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)}


def make_blocks(stack: StackConfig, rngs) -> nnx.Dict:
    """The blocks of each stack. The parameters of all layers of a stack are drawn together."""
    blocks = {}
    for place in layers.stacks(stack):
        keys = jax.random.split(rngs.params(), place.repeats)
        numbers = jnp.array([layer.number for layer in layers.layers(stack) if layer.stack == place.name])
        make = jax.vmap(partial(make_block, stack, place.block))
        blocks[place.name] = make(keys, numbers)
    return nnx.Dict(blocks)


def take_apart(stack: StackConfig, blocks) -> nnx.Dict:
    """The blocks of each stack as a list of single layers."""
    return nnx.Dict(
        {place.name: nnx.List(layers.unstack(blocks[place.name], place.repeats)) for place in layers.stacks(stack)}
    )


def are_apart(blocks) -> bool:
    return any(isinstance(each, nnx.List) for each in blocks.values())


class Pass(NamedTuple):
    """The results of a pass through the blocks, besides the stream."""

    caches: dict | None
    losses: dict
    statistics: dict  # {stack: {sublayer: {name: [R, ...]}}}
    captures: dict  # {stack: {site: [R, ...]}} of the values that taps record, in the order of computation


def scan(stack: StackConfig, blocks, stream: Stream, ctx: Context, caches, remat, taps: Request) -> tuple[Stream, Pass]:
    """The stream after all blocks, and the other results. Each segment is one compiled loop body."""
    losses: dict = {}
    statistics: dict = {}
    new_caches: dict = {}
    captures: dict = {}
    first = 0
    for segment in layers.segment_stacks(stack):
        stacked = {place.name: blocks[place.name] for place in segment}
        cached = {place.name: caches[place.name] for place in segment} if caches else None
        sites: dict = {}  # in the order of computation: a dict that leaves the scan has sorted keys

        def body(stream, xs, segment=segment, first=first, sites=sites):
            blocks, caches, repeat = xs
            losses: dict = {}
            new_caches, statistics, captures = ({} for _ in range(3))
            for i, place in enumerate(segment):
                of_layer = taps.layer(place.name, repeat)
                layer_ctx = ctx.layer(first + repeat * len(segment) + i, place.block, of_layer)
                block = constrain_parameters(ctx.mesh, blocks[place.name], f"blocks/{place.name}")
                stream, new_caches[place.name], aux = block(stream, layer_ctx, caches and caches[place.name])
                losses = add_losses(losses, aux.losses)
                statistics[place.name] = aux.statistics
                captures[place.name], sites[place.name] = aux.captures, of_layer.sites
            return stream, (new_caches if caches else None, losses, statistics, captures)

        repeats = segment[0].repeats
        xs = (stacked, cached, jnp.arange(repeats))
        stream, outputs = jax.lax.scan(remat(body), stream, xs)
        segment_caches, losses_R, segment_statistics, values = outputs
        losses = add_losses(losses, {name: value.sum(0) for name, value in losses_R.items()})
        statistics |= segment_statistics
        captures |= {name: {site: values[name][site] for site in order} for name, order in sites.items()}
        new_caches |= segment_caches or {}
        first += repeats * len(segment)
    return stream, Pass(new_caches if caches else None, losses, statistics, captures)


def unroll(
    stack: StackConfig, blocks, stream: Stream, ctx: Context, caches, remat, taps: Request
) -> tuple[Stream, Pass]:
    """Like `scan`, but each layer is compiled separately, and its cache is an array of its own: {stack: caches of the
    layers}. Blocks may be apart, too (`layers.apart`)."""
    all_stacks = layers.stacks(stack)
    single = {
        place.name: blocks[place.name] if are_apart(blocks) else layers.unstack(blocks[place.name], place.repeats)
        for place in all_stacks
    }
    of_layers: dict[str, list] = {place.name: [] for place in all_stacks}
    new_caches: dict[str, list] = {place.name: [] for place in all_stacks}
    losses: dict = {}
    sites: dict = {}
    for layer in layers.layers(stack):
        of_layer = taps.layer(layer.stack, layer.index)
        call = partial(Block.__call__, ctx=ctx.layer(layer.number, layer.block, of_layer))
        block = constrain_parameters(ctx.mesh, single[layer.stack][layer.index], f"blocks/{layer.stack}")
        stream, cache, aux = remat(call)(block, stream, cache=caches and caches[layer.stack][layer.index])
        sites[layer.stack] = of_layer.sites
        new_caches[layer.stack].append(cache)
        of_layers[layer.stack].append((aux.statistics, aux.captures))
        losses = add_losses(losses, aux.losses)
    stacked = {name: layers.stack(trees) for name, trees in of_layers.items()}
    return stream, Pass(
        new_caches if caches else None,
        losses,
        {name: statistics for name, (statistics, _) in stacked.items()},
        {name: {site: values[site] for site in sites[name]} for name, (_, values) in stacked.items()},
    )


def costs(stack: StackConfig, length: int) -> Costs:
    """Costs of all blocks and of the tables that they share."""
    total = weights(sum(table.shape[0] * table.shape[1] for table in shared_tables(stack).values()))
    for place in layers.stacks(stack):
        total += Block.costs(stack.around, stack.depth, stack.blocks[place.block], length) * place.repeats
        if stack.adapter.kind != "none":
            total += adapters.costs(abstract_block(stack, place.block), length) * place.repeats
    return total
