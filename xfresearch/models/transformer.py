"""embed -> blocks -> norm -> head.

A model is a function of (config, params): `init` draws the parameters, a nested dict with string keys in which the layers
of one pattern position are stacked; `bind` puts them into a `Transformer`, whose methods are traced under jit.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.config import ModelConfig
from xfresearch.errors import require
from xfresearch.kernels.head import Head
from xfresearch.kernels.lookup import lookup
from xfresearch.models.block import Block, Stream
from xfresearch.models.context import Context
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.linear import Bias, draw, kernel_std, times
from xfresearch.models.norms import Norm
from xfresearch.models.partition import lay_layer
from xfresearch.models.positions import SharedPositions, sinusoidal
from xfresearch.models.sizes import position_rows

REMAT = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


class Output(NamedTuple):
    hidden_BLD: jax.Array  # after the final norm
    losses: dict  # auxiliary losses {name: [B]}, each summed over a sequence's tokens and over layers
    caches: dict | None
    statistics: dict  # {stack: {name: [R, B, ...]}} of each of the stack's R layers, summed over a sequence's tokens


class Table(nnx.Module):
    """One vector of width D for each of `rows` ids, drawn with standard deviation `std` (0: as `model.init` says)."""

    def __init__(self, model: ModelConfig, rows: int, rngs, std: float = 0.0):
        std = std or kernel_std(model, model.width)
        self.table = nnx.Param(draw(rngs.params(), (rows, model.width), std, model))


class Transformer(nnx.Module):
    def __init__(self, model: ModelConfig, rngs):
        first = model.blocks[model.pattern[0]]
        self.config = model
        self.embed = Table(model, model.vocab_size, rngs, model.embedding_std)
        self.position = Table(model, position_rows(model), rngs) if model.position == "learned" else None
        self.shared = SharedPositions(model, rngs)
        learned_scale = jnp.full((), model.width**0.5, model.param_dtype)
        self.embedding_scale = nnx.Param(learned_scale) if model.embedding_scale == "learned" else None
        self.embedding_norm = Norm(model, model.embedding_norm, first)
        self.final_norm = Norm(model, model.final_norm, first)
        self.head = None if model.tie_embeddings else Table(model, model.vocab_size, rngs)
        self.head_bias = Bias(model, model.vocab_size) if model.head_bias else None
        repeats = model.depth // len(model.pattern)
        stacks = {}
        for stack, name in zip(stack_names(model), model.pattern, strict=True):
            keys = jax.random.split(rngs.params(), repeats)
            stacks[stack] = jax.vmap(lambda key, name=name: Block(model, model.blocks[name], nnx.Rngs(params=key)))(
                keys
            )
        self.blocks = nnx.Dict(stacks)

    def __call__(self, tokens_BL, ctx: Context, caches=None, layers: str = "scan", remat: str = "none") -> Output:
        """The final hidden states. `layers` is 'scan' or 'unroll' (needed by taps); the result is the same."""
        x_BLD = ctx.tap("embed", ctx.shard(self._embed(tokens_BL, ctx), "BLD"))
        run = self._unroll if layers == "unroll" or ctx.taps else self._scan
        stream = Stream(x_BLD, x_BLD if has_dual(self.config) else None)
        remat = REMAT["none" if ctx.taps else remat]
        stream, caches, losses, statistics = run(stream, self.shared.into(ctx), caches, remat)
        return Output(ctx.tap("final", self._end(stream)), losses, caches, statistics)

    def _end(self, stream: Stream):
        """The norm before the head; of a dual stream, x + norm(sum) (Xie et al. 2023, fig. 2)."""
        if stream.sum_BLD is None:
            return self.final_norm(stream.x_BLD)
        return stream.x_BLD + self.final_norm(stream.sum_BLD)

    def _embed(self, tokens_BL, ctx: Context):
        model = self.config
        # Looked up before the cast: the gradient of a row adds up all of its tokens, in float32.
        x_BLD = lookup(self.embed.table[...], "VD", tokens_BL, ctx.mesh).astype(model.dtype)
        if model.embedding_scale == "sqrt_width":
            x_BLD *= jnp.asarray(model.width**0.5, model.dtype)
        if self.embedding_scale is not None:
            x_BLD = times(x_BLD, self.embedding_scale[...])
        if model.position == "learned":
            rows_BL = ctx.positions_BL + model.position_offset
            x_BLD += lookup(self.position.table[...], "LD", rows_BL, ctx.mesh).astype(model.dtype)
        if model.position == "sinusoidal":
            x_BLD += sinusoidal(ctx.positions_BL, model.width).astype(model.dtype)
        return ctx.dropout(self.embedding_norm(x_BLD), model.dropout, "embed")

    def _scan(self, stream: Stream, ctx: Context, caches, remat):
        stacks, period = self._stacks(), len(self.config.pattern)

        def body(stream, xs):
            blocks, caches, repeat = xs
            new, losses, statistics = {}, {}, {}
            for i, name in enumerate(stacks):
                at = ctx.layer(repeat * period + i)
                block = lay_layer(ctx.mesh, blocks[name], name)
                stream, new[name], aux = block(stream, at, caches and caches[name])
                losses, statistics[name] = _add(losses, aux.losses), aux.statistics
            return stream, (new if caches else None, losses, statistics)

        repeats = jnp.arange(self.config.depth // period)
        stream, (caches, losses_R, statistics) = jax.lax.scan(remat(body), stream, (stacks, caches, repeats))
        return stream, caches, {name: value.sum(0) for name, value in losses_R.items()}, statistics

    def _unroll(self, stream: Stream, ctx: Context, caches, remat):
        repeats = self.config.depth // len(self.config.pattern)
        stacks = {name: unstack(stack, repeats) for name, stack in self._stacks().items()}
        cuts = {name: caches and unstack(caches[name], repeats) for name in stacks}
        new, statistics, losses, layer = {name: [] for name in stacks}, {name: [] for name in stacks}, {}, 0
        for repeat in range(repeats):
            for name in stacks:

                def call(block, stream, cache, layer=layer, name=name):
                    return lay_layer(ctx.mesh, block, name)(stream, ctx.layer(layer), cache)

                cache = caches and cuts[name][repeat]
                stream, cache, aux = remat(call)(stacks[name][repeat], stream, cache)
                new[name].append(cache)
                statistics[name].append(aux.statistics)
                losses, layer = _add(losses, aux.losses), layer + 1
        return stream, _stack(new) if caches else None, losses, _stack(statistics)

    def _stacks(self) -> dict:
        """The stacks in the pattern's order: a merged nnx.Dict has its keys sorted."""
        return {name: self.blocks[name] for name in stack_names(self.config)}

    def logit_head(self) -> Head:
        """What makes logits of the final hidden states."""
        table_VD = (self.head or self.embed).table[...].astype(self.config.dtype)
        return Head(table_VD, self.head_bias and self.head_bias.bias[...], self.config.logit_softcap)

    def logits(self, hidden_BLD):
        """Logits [B, L, V], float32 or wider."""
        return self.logit_head().logits(hidden_BLD)

    def init_caches(self, batch: int, length: int) -> dict:
        """Empty caches for decoding up to `length` tokens of `batch` sequences, layers stacked like parameters."""
        require(
            self.config.causal, "model.causal", False, "True to decode: each token is read before the next is known"
        )
        return {
            name: jax.vmap(lambda block: block.init_cache(batch, length))(stack) for name, stack in self.blocks.items()
        }


def _add(losses: dict, more: dict) -> dict:
    return losses | {name: losses[name] + value if name in losses else value for name, value in more.items()}


def _stack(layers: dict) -> dict:
    """{stack: trees of its layers} as {stack: one tree}."""
    return {name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for name, trees in layers.items()}


def unstack(tree, count: int) -> list:
    """`tree` cut along its first axis into `count` trees.

    The backward pass stacks the cotangents once; that of plain slices would add `count` padded copies of the whole.
    """
    leaves, structure = jax.tree.flatten(tree)
    cut = [_cut(leaf, count) for leaf in leaves]
    return [structure.unflatten([pieces[i] for pieces in cut]) for i in range(count)]


def _cut(array, count: int):
    @jax.custom_vjp
    def cut(array):
        return tuple(array[i] for i in range(count))

    cut.defvjp(lambda array: (cut(array), None), lambda _, pieces: (jnp.stack(pieces),))
    return cut(array)


def has_dual(model: ModelConfig) -> bool:
    """Whether a block of the model keeps the second stream of ResiDual."""
    return any(LAYOUTS[block.layout].dual for block in model.blocks.values())


def stack_names(model: ModelConfig) -> list[str]:
    """Keys of the stacks in `params['blocks']`, one per pattern position: the block's name, numbered where it recurs."""
    pattern = model.pattern
    return [name if pattern.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(pattern)]


def init(model: ModelConfig, key) -> dict:
    """Parameters of `model`, drawn from `key`: a nested dict of arrays with string keys."""
    return nnx.to_pure_dict(nnx.state(Transformer(model, nnx.Rngs(params=key))))


@cache
def _split(model: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: Transformer(model, nnx.Rngs(params=jax.random.key(0)))))


def abstract(model: ModelConfig) -> dict:
    """The parameters' shapes and dtypes, without drawing them."""
    return jax.tree.map(lambda leaf: leaf, _abstract(model, jax.config.jax_enable_x64))


@cache
def _abstract(model: ModelConfig, x64: bool) -> dict:
    """Traced once for a model; `x64` is JAX's setting, which float64 parameters depend on."""
    return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def bind(model: ModelConfig, params: dict) -> Transformer:
    """The model with `params` in it. Cheap under jit, where it only happens while tracing."""
    graph, state = _split(model)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
