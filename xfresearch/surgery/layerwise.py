"""Runs a network layer by layer, with the parameters of one layer in memory at a time.

The functions here are compiled once for each kind of block, however many layers have it. Arrays are in the dtype of the
computation; parameters are in float64 for float64, otherwise in float32.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xfresearch.config.fields import with_values
from xfresearch.kernels.cross_entropy import nll_of_logits
from xfresearch.models import layers, stack, transformer
from xfresearch.models.block import Block, Stream
from xfresearch.models.context import Context
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.models.parameters import Rngs, with_params
from xfresearch.models.taps import EVERYTHING, Patch, Taps
from xfresearch.runtime.trees import nested
from xfresearch.surgery.network import Network


class Pass(NamedTuple):
    """What a network computes for tokens [B, L]."""

    logits_BLV: np.ndarray
    streams: list[Stream]  # the input of each layer, and the output of the last one
    cached_BCV: np.ndarray | None  # logits of the last tokens, decoded one by one


class Runner:
    """A network in a dtype of computation."""

    def __init__(self, network: Network, dtype: str):
        self.network = network
        self.wide = "float64" if dtype == "float64" else "float32"
        self.model = resolve_model(with_values(network.resolved, {"dtype": dtype, "param_dtype": self.wide}))
        self.outside = self._arrays(network.outside)

    def _arrays(self, params: dict) -> dict:
        return nested({path: jnp.asarray(leaf, self.wide) for path, leaf in params.items()})

    def layer(self, number: int) -> tuple:
        """The static arguments and the arrays of the functions below for a layer."""
        name = layers.layer(self.model, number).block
        arrays = self._arrays(self.network.params(number))
        return (self.model, name), (arrays, self.outside.get("shared", {}), number)

    def run(self, tokens_BL, cached: int = 0, in_turn: bool = False) -> Pass:
        """The logits of a pass over the tokens, and of the last `cached` tokens decoded with the cache. in_turn: each token
        is sent to the next experts, instead of those that its router chooses."""
        tokens_BL = jnp.asarray(tokens_BL, jnp.int32)
        streams = [_embed(self.model, self.outside, tokens_BL)]
        decoded = streams[0]
        for number in range(len(self.network.layers)):
            static, arrays = self.layer(number)
            streams.append(_layer(*static, *arrays, streams[-1], in_turn=in_turn))
            decoded = _decode(*static, cached, *arrays, decoded) if cached else decoded
        cached_BCV = self._logits(decoded)[:, -cached:] if cached else None
        return Pass(self._logits(streams[-1]), streams, cached_BCV)

    def _logits(self, stream: Stream) -> np.ndarray:
        return np.asarray(_logits(self.model, self.outside, stream), np.float64)

    def gradient(self, tokens_BL, streams: list[Stream]) -> np.ndarray:
        """The gradient [B, L] of the mean loss for a factor of each token's embedding. A conversion may change the basis
        of the residual stream x, and so the gradient for x. It does not change x times that gradient."""
        tokens_BL = jnp.asarray(tokens_BL, jnp.int32)
        cotangent = _end_gradient(self.model, self.outside, tokens_BL, streams[-1])
        for number in reversed(range(len(self.network.layers))):
            static, arrays = self.layer(number)
            cotangent = _layer_gradient(*static, *arrays, streams[number], cotangent)
        products = jax.tree.map(lambda x, dx: (x * dx).sum(-1), streams[0], cotangent)
        return np.asarray(sum(jax.tree.leaves(products)), np.float64)

    def taps(self, number: int, stream: Stream) -> dict[str, np.ndarray]:
        """All named values of a layer, given its input."""
        (model, name), (params, shared, _) = self.layer(number)
        everything = Taps(EVERYTHING)
        ctx = Context(_positions(stream), shared=shared).layer(number, name, everything)
        _bind(model, name, params)(stream, ctx)
        return {f"blocks.{number}.{site}": value for site, value in everything.values.items()}


@cache
def _split(model: ModelConfig, name: str, x64: bool):
    make = lambda: Block(model.around, model.depth, model.blocks[name], Rngs(jax.random.key(0)))  # noqa: E731
    return nnx.split(nnx.eval_shape(make))


def _bind(model: ModelConfig, name: str, params: dict) -> Block:
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # JAX adds its settings later
    return with_params(_split(model, name, x64), params)


def _positions(stream: Stream, first: int = 0):
    rows, length = stream.x_BLD.shape[:2]
    return jnp.broadcast_to(first + jnp.arange(length), (rows, length))


@partial(jax.jit, static_argnums=0)
def _embed(model: ModelConfig, outside: dict, tokens_BL) -> Stream:
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    lm = transformer.bind(model, outside)
    x_BLD = lm.embedded(lm.embed.table[...], tokens_BL, Context(positions_BL))
    return stack.first_stream(model, x_BLD, Context(positions_BL))


@partial(jax.jit, static_argnums=0)
def _logits(model: ModelConfig, outside: dict, stream: Stream):
    lm = transformer.bind(model, outside)
    return lm.logits(lm.end(stream))


@partial(jax.jit, static_argnums=(0, 1), static_argnames="in_turn")
def _layer(model: ModelConfig, name: str, params: dict, shared: dict, number, stream: Stream, in_turn=False) -> Stream:
    mixtures = {each: options.mixture for each, options in model.blocks[name].sublayers.items() if in_turn}
    patches = {
        f"{each}.chosen": [Patch(partial(_next_experts, moe.experts))]
        for each, moe in mixtures.items()
        if moe and moe.routing == "token_choice"
    }
    ctx = Context(_positions(stream), shared=shared).layer(number, name, Taps(patches=patches))
    return _bind(model, name, params)(stream, ctx)[0]


def _next_experts(experts: int, chosen_BLk):
    """k experts for each token, such that all have tokens if there are enough tokens."""
    return (jnp.arange(chosen_BLk.size).reshape(chosen_BLk.shape) % experts).astype(chosen_BLk.dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(
    model: ModelConfig, name: str, count: int, params: dict, shared: dict, number, stream: Stream
) -> Stream:
    """As `_layer`: a pass over the tokens but the last `count`, which are then read one by one with the cache."""
    block = _bind(model, name, params)
    rows, length = stream.x_BLD.shape[:2]
    prompt = length - count
    segments_BS = jnp.ones((rows, length), jnp.int32)

    def read(part: Stream, first, cache):
        positions_BL = _positions(part, first)
        ctx = Context(
            positions_BL, jnp.ones_like(positions_BL), shared=shared, cache_index=first, cache_segments_BS=segments_BS
        )
        new, cache, _ = block(part, ctx.layer(number, name), cache)
        return cache, new

    cache, begun = read(jax.tree.map(lambda x: x[:, :prompt], stream), 0, block.init_cache(rows, length))

    def step(cache, xs):
        index, part = xs
        return read(jax.tree.map(lambda x: x[:, None], part), index, cache)

    rest = jax.tree.map(lambda x: x[:, prompt:].swapaxes(0, 1), stream)
    _, decoded = jax.lax.scan(step, cache, (jnp.arange(prompt, length), rest))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :, 0].swapaxes(0, 1)], 1), begun, decoded)


@partial(jax.jit, static_argnums=(0, 1))
def _layer_gradient(
    model: ModelConfig, name: str, params: dict, shared: dict, number, stream: Stream, cotangent: Stream
) -> Stream:
    _, back = jax.vjp(lambda stream: _layer(model, name, params, shared, number, stream), stream)
    return back(cotangent)[0]


@partial(jax.jit, static_argnums=0)
def _end_gradient(model: ModelConfig, outside: dict, tokens_BL, stream: Stream) -> Stream:
    def loss(stream: Stream):
        return nll_of_logits(_logits(model, outside, stream)[:, :-1], tokens_BL[:, 1:]).mean()

    return jax.grad(loss)(stream)
