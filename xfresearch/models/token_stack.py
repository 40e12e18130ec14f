"""A stack of blocks that reads tokens: embed -> blocks -> norm. A language model is one with an output head; its encoder, if
it has one, is another (encoder.py)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import jax.numpy as jnp
from flax import nnx

from xfresearch.kernels.lookup import lookup
from xfresearch.models import layers, stack
from xfresearch.models.block_config import check_norms
from xfresearch.models.context import Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import Norm, NormKind, NormSpec
from xfresearch.models.parameters import draw, kernel_std, parameter, times
from xfresearch.models.positions import EmbeddedPosition, sinusoidal
from xfresearch.models.stack import StackConfig
from xfresearch.models.stream import Stream
from xfresearch.options.fields import option, where
from xfresearch.runtime.errors import require

T = TypeVar("T", bound="TokenStackConfig")


@dataclass(frozen=True)
class EmbeddingOptions:
    """Options of the embedding, before the first block, and of the norm after the last block."""

    position: EmbeddedPosition = option("none", "positions that are added to the embedding")
    position_offset: int = option(
        0, "row of the position table that position 0 reads (OPT: 2)", low=0, needs=where(position="learned")
    )
    embedding_norm: NormKind = option("none", "norm of the embedding")
    embedding_scale: Literal["none", "sqrt_width", "learned"] = option(
        "none", "factor of the token embedding, applied before positions are added; learned starts at sqrt(width)"
    )
    embedding_std: float = option(
        0.0, "standard deviation of the initial token embedding; 0 for that of init", low=0.0, decides="initialisation"
    )
    final_norm: NormKind = option("layer", "norm before the output head")
    dropout: float = option(0.0, "dropout rate of the embedding", low=0.0, high=0.99, decides="training")


@dataclass(frozen=True)
class TokenStackConfig(EmbeddingOptions, StackConfig):
    def __hash__(self) -> int:  # `blocks` is a dict, which has no hash; equal configs have equal representations
        return hash(repr(self))

    @property
    def random(self) -> bool:
        """Whether the stack draws random numbers in training."""
        blocks = self.blocks.values()
        within = any(options.random for block in blocks for options in block.sublayers.values())
        return bool(self.dropout or within or any(block.dropout for block in blocks))

    def norm_spec(self, kind: str) -> NormSpec:
        """A norm of this kind outside the blocks. It has the norm options of the first block."""
        return self.blocks[layers.stacks(self)[0].block].norm_spec(kind)

    @property
    def norms_outside(self) -> tuple[str, ...]:
        """The kinds of the norms outside the blocks."""
        return self.embedding_norm, self.final_norm

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions, 0 without a table. The first `position_offset` rows are never read."""
        return self.max_length + self.position_offset if self.position == "learned" else 0

    @property
    def longest(self) -> int:
        """The longest sequence that its tables of positions and the capacity of its experts support; 0 for any."""
        return max(self.max_length if self.position == "learned" else 0, stack.longest_input(self))


def resolved(config: T) -> T:
    """The config with derived sizes filled in. Raises UserError at the first invalid option."""
    config = stack.resolved(config)
    first = layers.stacks(config)[0].block
    for name, block in config.blocks.items():
        elsewhere = config.norms_outside if name == first else ()
        check_norms(block, elsewhere, f"{config.key}.blocks.{name}")
    _check_streams(config)
    _check_final_norm(config)
    return config


def _check_streams(config: TokenStackConfig) -> None:
    """Requires the same streams in all blocks: what a block writes is lost to a block that reads other streams."""
    streams = {
        name: {
            value
            for branch in LAYOUTS[block.layout].branches
            for value in branch.connection.carried(stack.first_place(config, name))
        }
        for name, block in config.blocks.items()
    }
    last = layers.stacks(config)[-1].block
    allowed = f"a layout with the same streams as {config.blocks[last].layout!r} in the last layer"
    for name, block in config.blocks.items():
        require(streams[name] == streams[last], f"{config.key}.blocks.{name}.layout", block.layout, allowed)


def _check_final_norm(config: TokenStackConfig) -> None:
    """Requires the final norm for ResiDual's second stream, and forbids it directly after another norm."""
    last = config.blocks[layers.stacks(config)[-1].block]
    branch = stack.last_branch(config)
    if branch.connection.ends_with:
        allowed = f"a norm with layout={last.layout!r}, whose head reads {branch.connection.end_formula}"
        require(config.final_norm != "none", f"{config.key}.final_norm", config.final_norm, allowed)
        return
    normed = "post" in branch.norms and last.norm_at(f"{branch.name}_post").kind != "none"
    allowed = f"'none' if the last block, with layout={last.layout!r}, ends in a norm"
    require(not normed or config.final_norm == "none", f"{config.key}.final_norm", config.final_norm, allowed)


class Table(nnx.Module):
    """One vector of width D for each of `rows` ids, drawn with standard deviation `std` (0: that of `model.init`)."""

    def __init__(self, config: TokenStackConfig, rows: int, letters: str, rngs, std: float = 0.0):
        std = std or kernel_std(config.around, config.width)
        self.table = parameter(draw(rngs.params(), (rows, config.width), std, config.param_dtype), letters)


class TokenStack(nnx.Module):
    """The parameters around the blocks, and the steps of a pass. A subclass makes the table `embed` and the blocks."""

    blocks: nnx.Dict

    def make_ends(self, config: TokenStackConfig, rngs) -> None:
        """Makes the parameters before and after the blocks, except the table of tokens."""
        dtype, D = config.param_dtype, config.width
        self.config = config
        self.position = Table(config, config.position_rows, "LD", rngs) if config.position == "learned" else None
        self.shared = stack.SharedTables(config, rngs)
        learned_scale = config.embedding_scale == "learned"
        self.embedding_scale = parameter(jnp.full((), D**0.5, dtype), "") if learned_scale else None
        self.embedding_norm = Norm(config.norm_spec(config.embedding_norm), "D", (D,), dtype)
        self.final_norm = Norm(config.norm_spec(config.final_norm), "D", (D,), dtype)
        connection, at = stack.end(config)
        for name, initial in connection.end_parameters(at, dtype).items():
            setattr(self, f"end_{name}", parameter(*initial))

    def begin(self, table_VD, tokens_BL, ctx: Context) -> tuple[Stream, Context]:
        """The stream before the first block."""
        ctx = replace(ctx, shared=self.shared.values())
        x_BLD = ctx.tap("embed", ctx.shard(self.embedded(table_VD, tokens_BL, ctx), "BLD"))
        return stack.first_stream(self.config, x_BLD, ctx), ctx

    def runner(self, layers: str) -> Callable:
        """The function that runs the blocks: stack.unroll, also for layers that are apart, or stack.scan."""
        return stack.unroll if layers == "unroll" or stack.are_apart(self.blocks) else stack.scan

    def end(self, stream: Stream):
        """The final hidden states [B, L, D]: in most layouts the output of the final norm."""
        connection, at = stack.end(self.config)
        parameters = {name: getattr(self, f"end_{name}")[...] for name in connection.end_names}
        return connection.end(at, parameters, self.final_norm, stream)

    def embedded(self, table_VD, tokens_BL, ctx: Context):
        """The residual stream [B, L, D] before the first block."""
        x_BLD = self.embedding_norm(self.summed(table_VD, tokens_BL, ctx))
        return ctx.dropout(x_BLD, self.config.dropout, "embed")

    def summed(self, table_VD, tokens_BL, ctx: Context):
        """The embeddings of the tokens, and all that is added to them."""
        config = self.config
        # The lookup comes before the cast, so that the gradient of a row sums over all of its tokens in float32.
        x_BLD = lookup(table_VD, "VD", tokens_BL, ctx.mesh).astype(config.dtype)
        if config.embedding_scale == "sqrt_width":
            x_BLD *= jnp.asarray(config.width**0.5, config.dtype)
        if self.embedding_scale is not None:
            x_BLD = times(x_BLD, self.embedding_scale[...])
        if self.position is not None:
            rows_BL = ctx.positions_BL + config.position_offset
            x_BLD += lookup(self.position.table[...], "LD", rows_BL, ctx.mesh).astype(config.dtype)
        if config.position == "sinusoidal":
            x_BLD += sinusoidal(ctx.positions_BL, config.width).astype(config.dtype)
        return x_BLD


def costs(config: TokenStackConfig, length: int) -> Costs:
    """Costs of a token in sequences of `length`, without the table of tokens and the output head."""
    total = Costs(sequence_length=length) + weights(config.position_rows * config.width)
    total += weights(int(config.embedding_scale == "learned"))
    for kind in (config.embedding_norm, config.final_norm):
        total += config.norm_spec(kind).costs(config.width)
    connection, at = stack.end(config)
    return total + connection.end_costs(at) + stack.costs(config, length)
