"""Runs a network layer by layer, with the parameters of one layer in memory at a time.

The functions here are compiled once for each kind of block, however many layers have it. Arrays are in the dtype of the
computation; parameters are in float64 for float64, otherwise in float32.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.kernels.cross_entropy import nll_of_logits
from xfresearch.models import layers, stack, transformer
from xfresearch.models.block import Block, Stream
from xfresearch.models.context import Context, Source
from xfresearch.models.encoder import NAME
from xfresearch.models.model_config import ModelConfig, resolve_model
from xfresearch.models.parameters import with_params
from xfresearch.models.taps import EVERYTHING, Patch, Taps
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.options.fields import with_values
from xfresearch.runtime.trees import nested
from xfresearch.surgery.network import Network, outside_of, split_block


class Pass(NamedTuple):
    """What a network computes for tokens [B, L]."""

    logits_BLV: np.ndarray
    streams: list[Stream]  # the input of each layer, and the output of the last one
    cached_BCV: np.ndarray | None  # logits of the last tokens, decoded one by one
    of_encoder: list[Stream] = []  # the same of the encoder's layers
    source: Source | None = None  # what cross-attention reads


class Layers:
    """The layers of one stack of a network. `model` is its resolved config, `outside` the arrays outside of its blocks."""

    def __init__(self, network: Network, model: TokenStackConfig, outside: dict, dtype: str):
        self.network, self.model, self.dtype = network, model, dtype
        self.shared = outside.get("shared", {})

    def __len__(self) -> int:
        return len(self.network.layers)

    def at(self, number: int) -> tuple:
        """The static arguments and the arrays of the functions below for a layer."""
        name = layers.layer(self.model, number).block
        return (self.model, name), (_arrays(self.network.params(number), self.dtype), self.shared, number)

    def taps(self, number: int, stream: Stream, source: Source | None, read: Mapping) -> dict[str, np.ndarray]:
        """All named values of a layer, given its input, the source and what else it reads (Runner.run)."""
        (model, name), (params, shared, _) = self.at(number)
        everything = Taps(EVERYTHING)
        ctx = _context(stream, read, shared=shared, source=source).layer(number, name, everything)
        _bind(model, name, params)(stream, ctx)
        return {f"{model.prefix}blocks.{number}.{site}": value for site, value in everything.values.items()}


def _arrays(params: dict, dtype: str) -> dict:
    return nested({path: jnp.asarray(leaf, dtype) for path, leaf in params.items()})


class Runner:
    """A network in a dtype of computation."""

    def __init__(self, network: Network, dtype: str):
        self.network = network
        wide = "float64" if dtype == "float64" else "float32"
        self.model = resolve_model(with_values(network.resolved, {"dtype": dtype, "param_dtype": wide}))
        self.outside = _arrays(outside_of(network), wide)
        self.decoder = Layers(network, self.model, self.outside, wide)
        self.encoder = None
        if network.encoder and self.model.encoder:
            self.encoder = Layers(network.encoder, self.model.encoder, self.outside.get(NAME, {}), wide)

    def run(
        self, tokens_BL, cached: int = 0, in_turn: bool = False, source_BS=None, read: Mapping = {}, of_source: Mapping = {}
    ) -> Pass:
        """The logits of a pass over the tokens, and of the last `cached` tokens decoded with the cache. in_turn: each token
        is sent to the next experts, instead of those that its router chooses. `source_BS` are the tokens of the source of a
        model with an encoder. read, of_source: fields of a Context for the tokens and for those of the source; the cache
        is read without them."""
        tokens_BL = jnp.asarray(tokens_BL, jnp.int32)
        read, of_source = dict(read), dict(of_source)
        of_encoder, source = self._encoded(source_BS, in_turn, of_source)
        streams = [_embed(self.model, self.outside, tokens_BL, read)]
        decoded = streams[0]
        for number in range(len(self.decoder)):
            static, arrays = self.decoder.at(number)
            streams.append(_layer(*static, *arrays, streams[-1], source, read, in_turn=in_turn))
            decoded = _decode(*static, cached, *arrays, decoded, source) if cached else decoded
        cached_BCV = self._logits(decoded)[:, -cached:] if cached else None
        return Pass(self._logits(streams[-1]), streams, cached_BCV, of_encoder, source)

    def _encoded(self, source_BS, in_turn: bool, read: dict) -> tuple[list[Stream], Source | None]:
        """The input of each layer of the encoder and the output of the last one, and the source; [] and None without."""
        if self.encoder is None:
            return [], None
        tokens_BS = jnp.asarray(source_BS, jnp.int32)
        streams = [_embed(self.model, self.outside, tokens_BS, read, of_encoder=True)]
        for number in range(len(self.encoder)):
            static, arrays = self.encoder.at(number)
            streams.append(_layer(*static, *arrays, streams[-1], None, read, in_turn=in_turn))
        x_BSW = _end(self.model, self.outside, streams[-1])
        return streams, Source(tokens_BS, read.get("segments_BL"), read.get("positions_BL"), x_BSW)

    def _logits(self, stream: Stream) -> np.ndarray:
        return np.asarray(_logits(self.model, self.outside, stream), np.float64)

    def gradient(self, tokens_BL, made: Pass) -> np.ndarray:
        """The gradient [B, L] of the mean loss for a factor of each token's embedding, or [B, L + S] with a source, given a
        pass. It is x times the gradient for x, summed: a conversion that changes the basis of the residual stream x changes
        the gradient for x, but not this product."""
        tokens_BL = jnp.asarray(tokens_BL, jnp.int32)
        cotangent = _end_gradient(self.model, self.outside, tokens_BL, made.streams[-1])
        of_source = jax.tree.map(jnp.zeros_like, made.source and made.source.x_BSW)
        for number in reversed(range(len(self.decoder))):
            static, arrays = self.decoder.at(number)
            cotangent, more = _layer_gradient(*static, *arrays, made.streams[number], made.source, cotangent)
            of_source = jax.tree.map(jnp.add, of_source, more)
        products = [_product(made.streams[0], cotangent)]
        if self.encoder:
            cotangent = _source_gradient(self.model, self.outside, made.of_encoder[-1], of_source)
            for number in reversed(range(len(self.encoder))):
                static, arrays = self.encoder.at(number)
                cotangent, _ = _layer_gradient(*static, *arrays, made.of_encoder[number], None, cotangent)
            products.append(_product(made.of_encoder[0], cotangent))
        return np.concatenate(products, 1)


def _product(stream: Stream, cotangent: Stream) -> np.ndarray:
    """x times its gradient [B, L], for all values of a stream."""
    products = jax.tree.map(lambda x, dx: (x * dx).sum(-1), stream, cotangent)
    return np.asarray(sum(jax.tree.leaves(products)), np.float64)


def _bind(model: TokenStackConfig, name: str, params: dict) -> Block:
    return with_params(split_block(model, name), params)


def _positions(stream: Stream, first: int = 0):
    rows, length = stream.x_BLD.shape[:2]
    return jnp.broadcast_to(first + jnp.arange(length), (rows, length))


def _context(stream: Stream, read: Mapping, **more) -> Context:
    """The context of a pass; without positions in `read`, they are 0, 1, ..."""
    return Context(**({"positions_BL": _positions(stream)} | dict(read) | more))


@partial(jax.jit, static_argnums=0, static_argnames="of_encoder")
def _embed(model: ModelConfig, outside: dict, tokens_BL, read: dict, of_encoder: bool = False) -> Stream:
    ctx = _context(Stream(tokens_BL[..., None]), read)
    lm = transformer.bind(model, outside)
    of_stack: Any = lm.encoder if of_encoder else lm
    table_VD = (of_stack.embed or lm.embed).table[...]
    return stack.first_stream(of_stack.config, of_stack.embedded(table_VD, tokens_BL, ctx), ctx)


@partial(jax.jit, static_argnums=0)
def _end(model: ModelConfig, outside: dict, stream: Stream):
    """The encoder's output, given that of its last layer."""
    encoder = transformer.bind(model, outside).encoder
    assert encoder is not None
    return encoder.end(stream)


@partial(jax.jit, static_argnums=0)
def _logits(model: ModelConfig, outside: dict, stream: Stream):
    lm = transformer.bind(model, outside)
    return lm.logits(lm.end(stream))


@partial(jax.jit, static_argnums=(0, 1), static_argnames="in_turn")
def _layer(
    model: TokenStackConfig, name: str, params: dict, shared: dict, number, stream: Stream, source, read: dict, in_turn=False
) -> Stream:
    mixtures = {each: options.mixture for each, options in model.blocks[name].sublayers.items() if in_turn}
    patches = {
        f"{each}.chosen": [Patch(partial(_next_experts, moe.experts))]
        for each, moe in mixtures.items()
        if moe and moe.routing == "token_choice"
    }
    ctx = _context(stream, read, shared=shared, source=source).layer(number, name, Taps(patches=patches))
    return _bind(model, name, params)(stream, ctx)[0]


def _next_experts(experts: int, chosen_BLk):
    """k experts for each token, such that all have tokens if there are enough tokens."""
    return (jnp.arange(chosen_BLk.size).reshape(chosen_BLk.shape) % experts).astype(chosen_BLk.dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(
    model: TokenStackConfig, name: str, count: int, params: dict, shared: dict, number, stream: Stream, source
) -> Stream:
    """As `_layer`: a pass over the tokens but the last `count`, which are then read one by one with the cache."""
    block = _bind(model, name, params)
    rows, length = stream.x_BLD.shape[:2]
    prompt = length - count
    segments_BS = jnp.ones((rows, length), jnp.int32)
    # The cache has the keys and values of the source, so that the tokens read its segments alone.
    read_source = source and source._replace(x_BSW=None)

    def read(part: Stream, first, cache):
        positions_BL = _positions(part, first)
        ones_BL = jnp.ones_like(positions_BL)
        cached = {"cache_index": first, "cache_segments_BS": segments_BS}
        ctx = Context(positions_BL, ones_BL, shared=shared, source=read_source, **cached)
        new, cache, _ = block(part, ctx.layer(number, name), cache)
        return cache, new

    empty = block.init_cache(rows, length, Context(_positions(stream), source=source))
    cache, begun = read(jax.tree.map(lambda x: x[:, :prompt], stream), 0, empty)

    def step(cache, xs):
        index, part = xs
        return read(jax.tree.map(lambda x: x[:, None], part), index, cache)

    rest = jax.tree.map(lambda x: x[:, prompt:].swapaxes(0, 1), stream)
    _, decoded = jax.lax.scan(step, cache, (jnp.arange(prompt, length), rest))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :, 0].swapaxes(0, 1)], 1), begun, decoded)


@partial(jax.jit, static_argnums=(0, 1))
def _layer_gradient(
    model: TokenStackConfig, name: str, params: dict, shared: dict, number, stream: Stream, source, cotangent: Stream
) -> tuple[Stream, Any]:
    """The gradient for a layer's input, and for the source (None without)."""

    def layer(stream: Stream, x_BSW) -> Stream:
        return _layer(model, name, params, shared, number, stream, source and source._replace(x_BSW=x_BSW), {})

    _, back = jax.vjp(layer, stream, source and source.x_BSW)
    of_stream, of_source = back(cotangent)
    return of_stream, of_source


@partial(jax.jit, static_argnums=0)
def _end_gradient(model: ModelConfig, outside: dict, tokens_BL, stream: Stream) -> Stream:
    def loss(stream: Stream):
        return nll_of_logits(_logits(model, outside, stream)[:, :-1], tokens_BL[:, 1:]).mean()

    return jax.grad(loss)(stream)


@partial(jax.jit, static_argnums=0)
def _source_gradient(model: ModelConfig, outside: dict, stream: Stream, cotangent) -> Stream:
    """The gradient for the output of the encoder's last layer, given that for its source."""
    _, back = jax.vjp(partial(_end, model, outside), stream)
    return back(cotangent)[0]
