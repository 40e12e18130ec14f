"""Decoding with a cache: one pass reads the prompts, then each new token costs one pass over one position.

Prompts of different lengths are padded on the left, so that all rows write their next token to the same position of the
cache. Padding is segment 0, to which no token of a prompt attends. Positions count from the first token of the prompt.
A jitted call generates up to CHUNK tokens. The cache is donated to it, and the host only sees chunks. The cache also
holds the slots in the form that attention reads, so that a step never reads their parameters.

A step of a small batch takes as long as reading the parameters. A step that reads stacks would also copy each layer out of
them. So if layers are unrolled, `generate` first takes them apart, into copies that it keeps until it ends. Each layer then
has its own cache, which a step changes in place.

The output of a prompt does not depend on the other prompts: its random keys are made from the seed, the prompt, the
number of equal prompts before it, and the number of the token.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from xfresearch.kernels.defaults import fast_layers
from xfresearch.kernels.top_p import kept_by_top_p
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context, Source
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.rules import ruled, tokens_of
from xfresearch.models.sampling import DEFAULT, Sampling
from xfresearch.models.taps import NO_TAPS, Request
from xfresearch.runtime.errors import require
from xfresearch.sharding.devices import memory
from xfresearch.sharding.partition import activation_spec, constrain

CHUNK = 16  # tokens per jitted call: few enough to stream, enough to hide the overhead of the call


def generate(
    model: ModelConfig,
    params: dict,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    seed: int | Sequence[int] = 0,
    stops: tuple[int, ...] = (),
    vocab_size: int = 0,
    mesh=None,
    taps: Request = NO_TAPS,
    source: Source | None = None,
    prefix: bool = False,
) -> Iterator[list[list[int]]]:
    """Yields the new tokens of every prompt, at most CHUNK each at a time, until each has ended or has max_new_tokens.

    `prompts` are lists of at least one token, with one `seed` for all or one for each. A prompt ends before the first of
    the tokens `stops`, which are never yielded. Ids of `vocab_size` and above are never sampled (0: the whole
    vocabulary). `mesh` is the mesh of the parameters. It must divide the prompts evenly. `taps` are
    the values to change, in the passes over the prompts and over each new token. `source` is what an encoder reads, once.
    With `prefix`, the tokens of a prompt see each other.
    """
    tokens_BP, segments_BP = pad_left(prompts)
    keys_B = row_keys(prompts, seed)
    if mesh is not None:
        tokens_BP, segments_BP, keys_B = shard_rows(mesh, tokens_BP, segments_BP, keys_B)
        source = jax.tree.map(partial(shard_row, mesh), source)
    length = round_up(tokens_BP.shape[1] + max_new_tokens, 64)
    settings = (model, sampling, stops, vocab_size or model.vocab_size, mesh)
    params = for_steps(model, params, mesh)
    state = prefill(model, length, params, tokens_BP, segments_BP, keys_B, mesh, taps, source, prefix)
    ended = [False] * len(prompts)
    while max_new_tokens > 0 and not all(ended):
        count = min(CHUNK, max_new_tokens)
        state, tokens_BC = decode_chunk(settings, params, state, count, taps)
        rows = np.asarray(jax.block_until_ready(tokens_BC)).tolist()
        chunk = [[] if end else row[:count] for end, row in zip(ended, rows, strict=True)]
        texts = [list(takewhile(lambda token: token not in stops, row)) for row in chunk]
        ended = [end or len(text) < count for end, text in zip(ended, texts, strict=True)]
        yield texts
        max_new_tokens -= count


def padded_length(longest: int) -> int:
    """The length of rows of at most `longest` tokens: a power of two, so that few sizes are compiled."""
    return max(16, 1 << (longest - 1).bit_length())


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments [B, P] of left-padded prompts. P is the `padded_length` of the longest."""
    width = padded_length(max(map(len, prompts)))
    tokens_BP, segments_BP = np.zeros((2, len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BP[row, width - len(prompt) :] = prompt
        segments_BP[row, width - len(prompt) :] = 1
    return tokens_BP, segments_BP


def row_keys(prompts: Sequence[Sequence[int]], seed: int | Sequence[int]) -> jax.Array:
    """A random key for each prompt [B]. It does not depend on the other prompts, except that equal prompts with the same
    seed get different keys."""
    seen: Counter = Counter()
    numbers = []
    seeds_B = np.broadcast_to(seed, len(prompts)).astype(np.uint32)
    for row in zip(map(tuple, prompts), seeds_B.tolist(), strict=True):
        numbers.append(zlib.crc32(repr((row[0], seen[row])).encode()))
        seen[row] += 1
    return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds_B), jnp.array(numbers, jnp.uint32))


def shard_rows(mesh, tokens_BP, segments_BP, keys_B) -> tuple:
    """Shards the rows of arrays, which each process has in full, over the `mesh`."""
    require(mesh.shape["context"] == 1, "mesh.context", mesh.shape["context"], "1 to decode: it shards sequences")

    shard = partial(shard_row, mesh)
    keys_B = jax.random.wrap_key_data(shard(np.asarray(jax.random.key_data(keys_B))))
    return shard(tokens_BP), shard(segments_BP), keys_B


def shard_row(mesh, x) -> jax.Array:
    """An array [B] or [B, L], which each process has in full, with its rows sharded over the `mesh`."""
    x = np.asarray(x)
    sharding = NamedSharding(mesh, activation_spec(mesh, "BN"[: x.ndim], x.shape))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def for_steps(model: ModelConfig, params: dict, mesh=None) -> dict:
    """The parameters for passes over one position: with the layers apart if layers are unrolled and a copy fits."""
    apart = fast_layers(model.depth, mesh).name == "unroll" and has_room(params, mesh)
    return taken_apart(model, params) if apart else params


def has_room(params: dict, mesh=None) -> bool:
    """Whether a copy of the parameters leaves a quarter of the device's memory, if that is known."""

    def held(leaf) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    known = memory(mesh)
    return not known or 2 * sum(map(held, jax.tree.leaves(params))) <= 3 / 4 * known


@partial(jax.jit, static_argnums=0)
def taken_apart(model: ModelConfig, params: dict) -> dict:
    """`layers.apart`, compiled."""
    return layers.apart(model, params)


@partial(jax.jit, static_argnums=(0, 1, 6, 9))
def prefill(
    model: ModelConfig,
    length: int,
    params,
    tokens_BP,
    segments_BP,
    keys_B,
    mesh=None,
    taps=NO_TAPS,
    source=None,
    prefix: bool = False,
) -> dict:
    """The decoding state after the prompts. Its caches have room for `length` tokens per row, and hold the whole source."""
    B, P = tokens_BP.shape
    lm = transformer.bind(model, params)
    positions_BP = jnp.maximum(jnp.cumsum(segments_BP, 1) - 1, 0)
    segments_BS = jnp.pad(segments_BP, ((0, 0), (0, length - P)), constant_values=1)
    # After this pass, the tokens of a prefix are all before the new ones, which see them without it.
    prefix_BS = jnp.pad(segments_BP, ((0, 0), (0, length - P))) if prefix else None
    ctx = Context(
        positions_BP,
        segments_BP,
        cache_segments_BS=segments_BS,
        cache_prefix_BS=prefix_BS,
        source=source,
        mesh=mesh,
    )
    ctx, _ = lm.encoded(ctx, taps=taps)
    out = lm(tokens_BP, ctx, lm.init_caches(B, length, ctx), taps=taps)
    of_source = {} if source is None else {"source_segments": source.segments_BS}
    return of_source | {
        "caches": out.caches,
        "segments": segments_BS,
        "tokens": tokens_of(tokens_BP, segments_BP, length),
        "index": jnp.asarray(P),
        "position": positions_BP[:, -1] + 1,
        "keys": keys_B,
        "drawn": jnp.int32(0),
        "ended": jnp.zeros(B, bool),
        "logits": lm.logits(out.hidden_BLD[:, -1:])[:, 0],
    }


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode_chunk(settings: tuple, params, state: dict, count, taps: Request = NO_TAPS) -> tuple[dict, jax.Array]:
    """The state and the tokens [B, CHUNK] after `count` (at most CHUNK) more tokens per row. It stops early once every
    row has ended."""
    model, sampling, stops, vocab_size, mesh = settings
    lm = transformer.bind(model, params)

    def unfinished(carry):
        done, state, _ = carry
        return (done < count) & ~state["ended"].all()

    def step(carry):
        done, state, tokens_BC = carry
        keys_B = jax.vmap(jax.random.fold_in, (0, None))(state["keys"], state["drawn"])
        logits_BV = ruled(state["logits"][:, :vocab_size], sampling.rules, stops, state["tokens"], state["index"])
        token_B = draw(logits_BV, keys_B, sampling)
        return done + 1, advance(lm, state, token_B, stops, mesh, taps), tokens_BC.at[:, done].set(token_B)

    tokens_BC = jnp.zeros((state["ended"].shape[0], CHUNK), jnp.int32)
    _, state, tokens_BC = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, tokens_BC))
    return state, constrain(mesh, tokens_BC, "NN")  # replicated, because every process reads all rows


def advance(lm, state: dict, token_B, stops: tuple[int, ...], mesh=None, taps=NO_TAPS) -> dict:
    """The state after each row has read one more token."""
    segments_B1 = jnp.ones_like(token_B)[:, None]
    ctx = Context(
        state["position"][:, None],
        segments_B1,
        cache_index=state["index"],
        cache_segments_BS=state["segments"],
        source=Source(None, state["source_segments"]) if "source_segments" in state else None,
        mesh=mesh,
    )
    out = lm(token_B[:, None], ctx, state["caches"], taps=taps)
    return state | {
        "caches": out.caches,
        "tokens": state["tokens"].at[:, state["index"]].set(token_B),
        "index": state["index"] + 1,
        "position": state["position"] + 1,
        "drawn": state["drawn"] + 1,
        "ended": state["ended"] | jnp.isin(token_B, jnp.array(stops, jnp.int32)),
        "logits": lm.logits(out.hidden_BLD)[:, 0],
    }


def draw(logits_BV, keys_B, sampling: Sampling):
    """One token for each row [B], int32."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, truncate(logits_BV, sampling)).astype(jnp.int32)


def truncate(logits_BV, sampling: Sampling):
    """Logits over the temperature, -inf for tokens that top_k or top_p excludes. Ties with the last included token are
    included."""
    logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        last_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < last_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        logits_BV = jnp.where(kept_by_top_p(logits_BV, sampling.top_p), logits_BV, -jnp.inf)
    return logits_BV


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
