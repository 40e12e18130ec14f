"""The language model: embed -> blocks -> norm -> head, and the encoder of its source, if it has one.

A model is a function of (config, params). `init` draws the parameters: a nested dict with string keys, in which the
layers of a stack share arrays. `bind` puts them into a `Transformer`, whose methods are traced under jit.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.kernels.head import Head
from xfresearch.kernels.lookup import lookup
from xfresearch.models import adapters, encoder, head_layer, stack, token_stack
from xfresearch.models.context import Context
from xfresearch.models.costs import Costs, shared_by, weights
from xfresearch.models.encoder import Encoder
from xfresearch.models.head_layer import HeadLayer
from xfresearch.models.layers import are_apart, stacks
from xfresearch.models.linear import Bias
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.parameters import Rngs, with_params
from xfresearch.models.stream import Stream
from xfresearch.models.sublayers import Bound
from xfresearch.models.taps import NO_TAPS, OUTSIDE, Request
from xfresearch.models.token_stack import Table, TokenStack
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.trees import nested
from xfresearch.sharding.partition import param_shardings


class Output(NamedTuple):
    hidden_BLD: jax.Array  # what the output matrix reads: after the final norm, and the head's layer
    losses: dict  # auxiliary losses {name: [B]}, or encoder/name, summed over the tokens of a sequence and over layers
    caches: dict | None
    statistics: dict  # {stack: {sublayer: {name: [R, B, ...]}}} of a stack's R layers, summed over the tokens of a sequence
    captures: dict  # {stack: {site: [R, ...]}} of the values that taps record; of those outside, {"": {site: value}}


class Transformer(TokenStack):
    config: ModelConfig

    def __init__(self, model: ModelConfig, rngs):
        V = model.vocab_size
        self.embed = Table(model, V, "VD", rngs, model.embedding_std)
        self.make_ends(model, rngs)
        self.token_type = Table(model, model.token_types, "YD", rngs) if model.token_types else None
        layered = model.head_activation != "none"
        self.head_layer = HeadLayer(model, model.head_activation, model.head_norm, rngs) if layered else None
        self.head = None if model.tie_embeddings else Table(model, V, "VD", rngs)
        self.head_bias = Bias("V", (V,), model.param_dtype) if model.head_bias else None
        self.blocks = stack.make_blocks(model, rngs)
        self.encoder = Encoder(model.encoder, rngs) if model.encoder else None

    def __call__(
        self, tokens_BL, ctx: Context, caches=None, layers: str = "scan", remat: str = "none", taps: Request = NO_TAPS
    ) -> Output:
        """The final hidden states. `layers` is 'scan' or 'unroll', with the same result; layers that are apart are
        unrolled. `taps` are the values to record and to change. A model with an encoder reads the source of `ctx`."""
        ctx, encoded = self.encoded(ctx, caches, layers, remat, taps)
        outside = taps.outside()
        table_VD = self.embed.table[...]
        stream, ctx = self.begin(table_VD, tokens_BL, replace(ctx, taps=outside))
        run_blocks = self.runner(layers)
        stream, of_blocks = run_blocks(self.config, self.blocks, stream, ctx, caches, stack.REMAT[remat], taps)
        hidden_BLD = ctx.tap("final", self.end(stream))
        captures = encoded.captures | of_blocks.captures | {OUTSIDE: outside.values}
        losses, statistics = encoded.losses | of_blocks.losses, encoded.statistics | of_blocks.statistics
        return Output(hidden_BLD, losses, of_blocks.caches, statistics, captures)

    def summed(self, table_VD, tokens_BL, ctx: Context):
        x_BLD = super().summed(table_VD, tokens_BL, ctx)
        if self.token_type is None:
            return x_BLD
        types_BL = jnp.zeros_like(tokens_BL) if ctx.token_types_BL is None else ctx.token_types_BL
        return x_BLD + lookup(self.token_type.table[...], "YD", types_BL, ctx.mesh).astype(self.config.dtype)

    def end(self, stream: Stream):
        """What the output matrix reads."""
        x_BLD = super().end(stream)
        return x_BLD if self.head_layer is None else self.head_layer(x_BLD)

    def encoded(self, ctx: Context, caches=None, layers="scan", remat="none", taps: Request = NO_TAPS):
        """The context with the encoding of its source, and the other results of the encoder. With caches the encoder does
        not run: they have the keys and values of the source."""
        if self.encoder is None or caches is not None:
            return ctx, stack.Pass(None, {}, {}, {})
        if ctx.source is None:
            raise UserError("source: this model has an encoder, so each pass needs a source beside the tokens")
        source, encoded = self.encoder(self.embed.table[...], ctx, layers, remat, taps)
        return replace(ctx, source=source), encoded

    def sublayers(self, role: str = "", has: str = "", layer: int | None = None) -> Iterator[Bound]:
        """Sublayers with their parameters, chosen as by `config.sublayers`. It may be traced."""
        of_stack = {each.config.prefix: each.blocks for each in (self, self.encoder) if each is not None}
        for (prefix, at), chosen in groupby(self.config.sublayers(role, has, layer), lambda each: (each.prefix, each.layer)):
            block = jax.tree.map(lambda leaf, index=at.index: leaf[index], of_stack[prefix][at.stack])
            block = adapters.merged(block)
            yield from (Bound(each, block) for each in chosen)

    def logit_head(self) -> Head:
        """The output head, which makes logits of the final hidden states (`Output.hidden_BLD`)."""
        table_VD = (self.head or self.embed).table[...].astype(self.config.dtype)
        bias_V = None if self.head_bias is None else self.head_bias.bias[...]
        return Head(table_VD, bias_V, self.config.logit_softcap, self.config.head_factor)

    def logits(self, hidden_BLD: jax.Array) -> jax.Array:
        """Logits [B, L, V], float32 or wider."""
        return self.logit_head().logits(hidden_BLD)

    def init_caches(self, batch: int, length: int, ctx: Context | None = None) -> dict:
        """Caches to decode up to `length` tokens of `batch` sequences, stacked or apart like the parameters. They are empty,
        but for the keys and values of the source that `ctx` has encoded."""
        allowed = "True to decode: the model reads each token before the next one is known"
        require(self.config.causal, "model.causal", False, allowed)
        if stack.are_apart(self.blocks):
            return {name: [block.init_cache(batch, length, ctx) for block in each] for name, each in self.blocks.items()}
        make = jax.vmap(lambda block: block.init_cache(batch, length, ctx))
        return {name: make(layers) for name, layers in self.blocks.items()}

    @staticmethod
    def costs(model: ModelConfig, length: int) -> Costs:
        """Costs for sequences of `length` tokens, and sources as long as the encoder's max_length."""
        V, D = model.vocab_size, model.width
        total = weights(V * D if model.tie_embeddings else 2 * V * D) + weights(V * model.head_bias)
        total += Costs(flops_per_token=2 * V * D, sequence_length=length) + token_stack.costs(model, length)
        total += weights(model.token_types * D)
        if model.head_activation != "none":
            total += head_layer.costs(model, model.head_norm)
        if model.encoder:
            of_source = encoder.costs(model.encoder)
            shared = shared_by(of_source.flops_per_token * model.encoder.max_length, length)
            total += Costs(of_source.parameters, of_source.active_parameters, shared)
        return total


def init(model: ModelConfig, key) -> dict:
    """Initial parameters of `model`, drawn from `key`: a nested dict of arrays with string keys."""
    return nnx.to_pure_dict(nnx.state(Transformer(model, Rngs(key))))


def abstract(model: ModelConfig) -> dict:
    """Shapes and dtypes of the parameters. Nothing is drawn."""
    return nnx.to_pure_dict(_split(model)[1])


def _split(model: ModelConfig, apart: bool = False):
    return _traced(model, apart, jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # JAX adds its settings later


@cache
def _traced(model: ModelConfig, apart: bool, x64: bool):
    """The graph and the abstract state of a model. `x64`, JAX's setting, is part of the cache key: dtypes depend on it."""

    def make():
        lm = Transformer(model, Rngs(jax.random.key(0)))
        if apart:
            lm.blocks = stack.take_apart(model, lm.blocks)
        return lm

    return nnx.split(nnx.eval_shape(make))


def axes(model: ModelConfig) -> dict:
    """The letters of each parameter: a tree like the parameters, with Axes as leaves. Stacked ones start with N."""
    by_path = {}
    for path, variable in nnx.to_flat_state(_split(model)[1]):
        leaf = variable.axes
        if "blocks" in path[:2]:  # the encoder's are inside of "encoder"
            leaf = replace(leaf, letters="N" + leaf.letters)
        by_path["/".join(map(str, path))] = leaf
    return nested(by_path)


def bind(model: ModelConfig, params: dict) -> Transformer:
    """The model with the parameters `params`, whose layers are stacked or apart (`layers.apart`). Under jit this only
    happens during tracing, so it is cheap."""
    return with_params(_split(model, are_apart(params)), params)


def after_update(model: ModelConfig, params: dict, statistics: dict) -> dict:
    """`params` after the additional update rules of sublayers, given statistics {stack: {sublayer: {name: [R, ...]}}}."""
    new = params | {"blocks": _after_update(model, params["blocks"], statistics)}
    if model.encoder:
        of_encoder = {name.removeprefix(f"{encoder.NAME}/"): each for name, each in statistics.items() if "/" in name}
        blocks = _after_update(model.encoder, params[encoder.NAME]["blocks"], of_encoder)
        new |= {encoder.NAME: params[encoder.NAME] | {"blocks": blocks}}
    return new


def _after_update(config: stack.StackConfig, params: dict, statistics: dict) -> dict:
    blocks = dict(params)
    modules = {(name, branch.name): place.options for name, branch, place in config.places()}
    for place in stacks(config):
        for (block, sublayer), options in modules.items():
            if block == place.block and sublayer in blocks[place.name]:
                old = blocks[place.name][sublayer]
                of_sublayer = statistics[place.name].get(sublayer, {})
                new = stack.kind_of(options).module.after_update(old, options, of_sublayer)
                blocks[place.name] = blocks[place.name] | {sublayer: new}
    return blocks


def abstract_params(model: ModelConfig, mesh=None) -> dict:
    """Shapes, dtypes and shardings of a model's parameters, on the first device or sharded over a `mesh`."""
    shapes = abstract(model)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = param_shardings(mesh, shapes, axes(model))
    return jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings)
