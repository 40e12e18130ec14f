"""The encoder of a model with two stacks: the same blocks over the source, whose output cross-attention reads.

    s = norm(blocks(embed(source)))

The stack that makes the logits is the decoder. By default every position of the source sees all others. Its parameters are
params["encoder"], and its taps begin with 'encoder.'.
"""

import zlib
from dataclasses import dataclass, fields, replace
from typing import Literal

import jax
import jax.numpy as jnp

from xfresearch.models import stack, token_stack
from xfresearch.models.context import Context, Source
from xfresearch.models.costs import Costs, weights
from xfresearch.models.stack import Pass, StackOptions
from xfresearch.models.taps import ENCODER, Request
from xfresearch.models.token_stack import EmbeddingOptions, Table, TokenStack, TokenStackConfig
from xfresearch.options.fields import option
from xfresearch.runtime.errors import require

NAME = ENCODER  # in model.stacks, in the parameters and in the names of taps


@dataclass(frozen=True)
class EncoderConfig(EmbeddingOptions, StackOptions):
    """The options of an encoder. Initial values and dtypes (NumberOptions) are those of the model."""

    width: int = option(0, "width W of the encoder's stream; 0 for model.width", low=0)
    max_length: int = option(0, "length of a source that positions and costs are for; 0 for source_length", low=0)
    causal: bool = option(False, "a position of the source sees only itself and earlier positions")
    embedding: Literal["shared", "own"] = option("shared", "the token embedding: the decoder's, or another one")


@dataclass(frozen=True)
class EncoderStack(EncoderConfig, TokenStackConfig):
    """An encoder with all that its parameters and its function depend on."""

    vocab_size: int = 0

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def key(self) -> str:
        return f"model.stacks.{NAME}"

    @property
    def prefix(self) -> str:
        return f"{NAME}."


def encoder_of(decoder: TokenStackConfig, options: EncoderConfig, vocab_size: int) -> EncoderStack:
    """The encoder with these options beside a decoder, whose initial values and dtypes it shares."""
    numbers = {each.name: getattr(decoder, each.name) for each in fields(stack.NumberOptions)}
    given = {each.name: getattr(options, each.name) for each in fields(EncoderConfig)}
    return EncoderStack(**given | numbers | {"width": options.width or decoder.width}, vocab_size=vocab_size)


def resolved(encoder: EncoderStack, width: int) -> EncoderConfig:
    """The options of an encoder with derived sizes, beside a decoder of `width`. Raises UserError at the first invalid
    option."""
    shared = encoder.embedding == "shared"
    allowed = f"'own' with a width of {encoder.width}: that of the decoder is {width}"
    require(not shared or encoder.width == width, f"{encoder.key}.embedding", encoder.embedding, allowed)
    std, allowed = encoder.embedding_std, "0 with embedding='shared': the table is the decoder's"
    require(not shared or not std, f"{encoder.key}.embedding_std", std, allowed)
    return options_of_stack(token_stack.resolved(encoder))


def options_of_stack(encoder: EncoderStack) -> EncoderConfig:
    """The options of an encoder, without the initial values, dtypes and adapters, which are those of its model."""
    return EncoderConfig(**{each.name: getattr(encoder, each.name) for each in fields(EncoderConfig)})


class Encoder(TokenStack):
    def __init__(self, config: EncoderStack, rngs):
        own = config.embedding == "own"
        self.embed = Table(config, config.vocab_size, "VD", rngs, config.embedding_std) if own else None
        self.make_ends(config, rngs)
        self.blocks = stack.make_blocks(config, rngs)

    def __call__(self, shared_VD, ctx: Context, layers: str, remat: str, taps: Request) -> tuple[Source, Pass]:
        """The source of `ctx` with its encoding, and the other results of the pass. `shared_VD` is the decoder's table."""
        source = ctx.source
        assert source is not None
        inner = taps.within(NAME)
        outside = inner.outside()
        positions_BS = source.positions_BS
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(source.tokens_BS.shape[1]), source.tokens_BS.shape)
        key = None if ctx.key is None else jax.random.fold_in(ctx.key, zlib.crc32(NAME.encode()))
        execution = replace(ctx.execution, reach=())  # that of the decoder's blocks, which may have the same names
        own = Context(positions_BS, source.segments_BS, key, outside, mesh=ctx.mesh, execution=execution)
        table_VD = shared_VD if self.embed is None else self.embed.table[...]
        stream, own = self.begin(table_VD, source.tokens_BS, own)
        run_blocks = self.runner(layers)
        stream, of_blocks = run_blocks(self.config, self.blocks, stream, own, None, stack.REMAT[remat], inner)
        return source._replace(x_BSW=own.tap("final", self.end(stream))), _named(of_blocks, outside.values)


def _named(of_blocks: Pass, outside: dict) -> Pass:
    """The results of the encoder, under the names that they have in the whole model."""
    losses, statistics, captures = (
        {f"{NAME}/{name}": values for name, values in each.items()}
        for each in (of_blocks.losses, of_blocks.statistics, of_blocks.captures)
    )
    return Pass(of_blocks.caches, losses, statistics, captures | {f"{NAME}/": outside})


def stack_of(name: str) -> str:
    """NAME for the name of a loss or of statistics of the encoder, '' for one of the decoder."""
    return NAME if name.startswith(f"{NAME}/") else ""


def costs(encoder: EncoderStack) -> Costs:
    """Costs of one token of the source, in a source of `max_length` tokens."""
    own = encoder.vocab_size * encoder.width if encoder.embedding == "own" else 0
    return token_stack.costs(encoder, encoder.max_length) + weights(own)
