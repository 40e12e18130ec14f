"""The language model: embed -> blocks -> norm -> head.

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
from xfresearch.models import stack
from xfresearch.models.context import Context
from xfresearch.models.costs import Costs, weights
from xfresearch.models.layers import are_apart, stacks
from xfresearch.models.linear import Bias
from xfresearch.models.model_config import ModelConfig, position_rows
from xfresearch.models.norms import Norm
from xfresearch.models.parameters import Rngs, draw, kernel_std, parameter, times, with_params
from xfresearch.models.positions import sinusoidal
from xfresearch.models.stream import Stream
from xfresearch.models.sublayers import Bound
from xfresearch.models.taps import NO_TAPS, OUTSIDE, Request
from xfresearch.runtime.errors import require
from xfresearch.runtime.trees import nested
from xfresearch.sharding.partition import param_shardings


class Output(NamedTuple):
    hidden_BLD: jax.Array  # after the final norm
    losses: dict  # auxiliary losses {name: [B]}, summed over the tokens of a sequence and over layers
    caches: dict | None
    statistics: dict  # {stack: {name: [R, B, ...]}} of the R layers of a stack, summed over the tokens of a sequence
    captures: dict  # {stack: {site: [R, ...]}} of the values that taps record; of those outside, {"": {site: value}}


class Table(nnx.Module):
    """One vector of width D for each of `rows` ids, drawn with standard deviation `std` (0: that of `model.init`)."""

    def __init__(self, model: ModelConfig, rows: int, letters: str, rngs, std: float = 0.0):
        std = std or kernel_std(model.around, model.width)
        self.table = parameter(draw(rngs.params(), (rows, model.width), std, model.param_dtype), letters)


class Transformer(nnx.Module):
    def __init__(self, model: ModelConfig, rngs):
        V, D = model.vocab_size, model.width
        dtype = model.param_dtype
        self.config = model
        self.embed = Table(model, V, "VD", rngs, model.embedding_std)
        self.position = Table(model, position_rows(model), "LD", rngs) if model.position == "learned" else None
        self.shared = stack.SharedTables(model, rngs)
        learned_scale = model.embedding_scale == "learned"
        self.embedding_scale = parameter(jnp.full((), D**0.5, dtype), "") if learned_scale else None
        self.embedding_norm = Norm(model.norm_spec(model.embedding_norm), "D", (D,), dtype)
        self.final_norm = Norm(model.norm_spec(model.final_norm), "D", (D,), dtype)
        self.head = None if model.tie_embeddings else Table(model, V, "VD", rngs)
        self.head_bias = Bias("V", (V,), dtype) if model.head_bias else None
        self.blocks = stack.make_blocks(model, rngs)

    def __call__(
        self, tokens_BL, ctx: Context, caches=None, layers: str = "scan", remat: str = "none", taps: Request = NO_TAPS
    ) -> Output:
        """The final hidden states. `layers` is 'scan' or 'unroll', with the same result; layers that are apart are
        unrolled. `taps` are the values to record and to change."""
        outside = taps.outside()
        ctx = replace(ctx, taps=outside, shared=self.shared.values())
        x_BLD = ctx.tap("embed", ctx.shard(self.embedded(tokens_BL, ctx), "BLD"))
        run_blocks = stack.unroll if layers == "unroll" or stack.are_apart(self.blocks) else stack.scan
        stream = stack.first_stream(self.config, x_BLD, ctx)
        stream, of_blocks = run_blocks(self.config, self.blocks, stream, ctx, caches, stack.REMAT[remat], taps)
        hidden_BLD = ctx.tap("final", self.end(stream))
        captures = of_blocks.captures | {OUTSIDE: outside.values}
        return Output(hidden_BLD, of_blocks.losses, of_blocks.caches, of_blocks.statistics, captures)

    def end(self, stream: Stream):
        """What the output head reads after the last layer: the output of the final norm, in most layouts."""
        return stack.last_branch(self.config).connection.end(self.final_norm, stream)

    def sublayers(self, role: str = "", has: str = "", layer: int | None = None) -> Iterator[Bound]:
        """Sublayers with their parameters, chosen as by `config.sublayers`. It may be traced."""
        for at, chosen in groupby(self.config.sublayers(role, has, layer), lambda each: each.layer):
            block = jax.tree.map(lambda leaf, index=at.index: leaf[index], self.blocks[at.stack])
            yield from (Bound(each, block) for each in chosen)

    def embedded(self, tokens_BL, ctx: Context):
        """The residual stream [B, L, D] before the first block."""
        model = self.config
        # The lookup comes before the cast, so that the gradient of a row sums over all of its tokens in float32.
        x_BLD = lookup(self.embed.table[...], "VD", tokens_BL, ctx.mesh).astype(model.dtype)
        if model.embedding_scale == "sqrt_width":
            x_BLD *= jnp.asarray(model.width**0.5, model.dtype)
        if self.embedding_scale is not None:
            x_BLD = times(x_BLD, self.embedding_scale[...])
        if self.position is not None:
            rows_BL = ctx.positions_BL + model.position_offset
            x_BLD += lookup(self.position.table[...], "LD", rows_BL, ctx.mesh).astype(model.dtype)
        if model.position == "sinusoidal":
            x_BLD += sinusoidal(ctx.positions_BL, model.width).astype(model.dtype)
        return ctx.dropout(self.embedding_norm(x_BLD), model.dropout, "embed")

    def logit_head(self) -> Head:
        """The output head, which makes logits of the final hidden states."""
        table_VD = (self.head or self.embed).table[...].astype(self.config.dtype)
        bias_V = None if self.head_bias is None else self.head_bias.bias[...]
        return Head(table_VD, bias_V, self.config.logit_softcap)

    def logits(self, hidden_BLD: jax.Array) -> jax.Array:
        """Logits [B, L, V], float32 or wider."""
        return self.logit_head().logits(hidden_BLD)

    def init_caches(self, batch: int, length: int) -> dict:
        """Empty caches to decode up to `length` tokens of `batch` sequences, stacked or apart like the parameters."""
        allowed = "True to decode: the model reads each token before the next one is known"
        require(self.config.causal, "model.causal", False, allowed)
        if stack.are_apart(self.blocks):
            return {name: [block.init_cache(batch, length) for block in each] for name, each in self.blocks.items()}
        make = jax.vmap(lambda block: block.init_cache(batch, length))
        return {name: make(layers) for name, layers in self.blocks.items()}

    @staticmethod
    def costs(model: ModelConfig, length: int) -> Costs:
        """Costs for sequences of `length` tokens."""
        V, D = model.vocab_size, model.width
        total = weights(V * D if model.tie_embeddings else 2 * V * D) + weights(V * model.head_bias)
        total += Costs(flops_per_token=2 * V * D, sequence_length=length)
        total += weights(position_rows(model) * D) + weights(int(model.embedding_scale == "learned"))
        for kind in (model.embedding_norm, model.final_norm):
            total += model.norm_spec(kind).costs(D)
        return total + stack.costs(model, length)


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
    """The graph and the abstract state of a model. `x64` is JAX's setting, on which float64 parameters depend."""

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
        if path[0] == "blocks":
            leaf = replace(leaf, letters="N" + leaf.letters)
        by_path["/".join(map(str, path))] = leaf
    return nested(by_path)


def bind(model: ModelConfig, params: dict) -> Transformer:
    """The model with the parameters `params`, whose layers are stacked or apart (`layers.apart`). Under jit this only
    happens during tracing, so it is cheap."""
    return with_params(_split(model, are_apart(params)), params)


def after_update(model: ModelConfig, params: dict, statistics: dict) -> dict:
    """`params` after the additional update rules of sublayers, given statistics {stack: {name: [R, ...]}}."""
    blocks = dict(params["blocks"])
    modules = {(name, branch.name): place.options for name, branch, place in model.places()}
    for place in stacks(model):
        for (block, sublayer), options in modules.items():
            if block == place.block and sublayer in blocks[place.name]:
                old = blocks[place.name][sublayer]
                new = stack.kind_of(options).module.after_update(old, options, statistics[place.name])
                blocks[place.name] = blocks[place.name] | {sublayer: new}
    return params | {"blocks": blocks}


def abstract_params(model: ModelConfig, mesh=None) -> dict:
    """Shapes, dtypes and shardings of a model's parameters, on the first device or sharded over a `mesh`."""
    shapes = abstract(model)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = param_shardings(mesh, shapes, axes(model))
    return jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings)
