"""Contracts 2 and 3: models are causal, by their gradients, and cached decoding equals the full forward pass.

The default run tests the gradient of every kind of attention, and decoding with every kind of cache; `long` tests all
variants. test_reference.py also implies that all variants are causal.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import (
    ALL,
    BATCH,
    DISTINCT,
    KINDS,
    LENGTH,
    VARIANTS,
    in_float64,
    marked,
    random_params,
    tokens_for,
)
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context

CHUNKS = [(5, 1, 1, 1), (1, 5, 1, 1)]  # few sizes: each is compiled anew
PADDING = 2

# Prefixes of variants that have the same cache as others: layouts, norms, biases, sinks, activations and identities in place
# of projections do not change it.
SAME_CACHE = (
    "layout=",
    "norm",
    "attention.bias",
    "attention.lambdas.norm",
    "feed_forward.kind=glu",
    "feed_forward.kind=solu",
)
SAME_CACHE += ("feed_forward.bias", "configs/palm", "configs/vanilla_2017_decoder", "configs/gptj", "configs/normless")
SAME_CACHE += ("attention.query=identity", "attention.value=identity", "attention.qk_norm", "attention.output_gate")
SAME_CACHE += ("attention.memory_activation", "attention[slots]", "attention.shaping", "feed_forward[moe].moe.balance")
SAME_CACHE += ("feed_forward[moe].moe.shared", "pattern-repeated", "configs/all_attention_enwik8", "configs/simplified")
SAME_CACHE += ("attention.key=identity", "attention.value=key", "configs/gpt2", "attention.sink")
SAME_CACHE += ("configs/lambda_lm", "configs/mixtral_8x7b")  # tested as attention.kind=lambda, feed_forward.kind=moe
CACHED = ["layout=skipless", *(name for name in DISTINCT if not name.startswith(SAME_CACHE))]


@pytest.fixture(params=[case for case in marked(CACHED) if ALL[case.values[0]].causal])
def variant(request, x64):
    return case(request.param)


def case(name: str) -> tuple:
    """A variant in float64, its parameters, and tokens."""
    config = in_float64(ALL[name])
    return config, random_params(config), tokens_for(config)


KINDS_OF_ATTENTION = ["base", *(f"attention.kind={kind}" for kind in KINDS["attention"])]


@pytest.mark.parametrize("name", marked(KINDS_OF_ATTENTION, [name for name in ALL if ALL[name].causal]))
def test_is_causal_by_gradient(name, x64):
    config, params, tokens_BL = case(name)

    def logits(shift_BLD):
        return forward(config, params, tokens_BL, replace={"embed": lambda embedded_BLD: embedded_BLD + shift_BLD})[0]

    _, vjp = jax.vjp(logits, jnp.zeros((*tokens_BL.shape, config.width), config.dtype))
    weights_V = np.random.default_rng(0).standard_normal(config.vocab_size)
    for t in (0, 3, LENGTH - 2):
        cotangent_BLV = np.zeros((*tokens_BL.shape, config.vocab_size))
        cotangent_BLV[0, t] = weights_V
        gradient_BL = np.abs(vjp(jnp.asarray(cotangent_BLV))[0]).max(-1)
        assert gradient_BL[0, t + 1 :].sum() == 0, f"logits at {t} depend on later positions"
        assert gradient_BL[1:].sum() == 0, f"logits at {t} depend on another sequence"
        mixes = any(block.attention.kind != "slots" for block in config.blocks.values())
        assert gradient_BL[0, :t].any() or t == 0 or not mixes, f"logits at {t} depend on no earlier position"


def decode(config, params, tokens_BL, chunks, step) -> jax.Array:
    """Logits from a cache that is longer than the text and filled chunk by chunk."""
    caches = transformer.bind(config, params).init_caches(BATCH, LENGTH + 3)
    start, pieces = 0, []
    for size in chunks:
        logits_BCV, caches = step(params, tokens_BL[:, start : start + size], start, caches)
        pieces.append(logits_BCV)
        start = start + size
    return jnp.concatenate(pieces, 1)


def decoding_step(config):
    """A compiled pass over a chunk of tokens: (params, tokens_BC, position of the first, caches) -> logits_BCV, caches."""

    @jax.jit
    def step(params, tokens_BC, start, caches):
        model = transformer.bind(config, params)
        positions_BC = jnp.broadcast_to(start + jnp.arange(tokens_BC.shape[1]), tokens_BC.shape)
        out = model(tokens_BC, Context(positions_BC, cache_index=start), caches)
        return model.logits(out.hidden_BLD), out.caches

    return step


def test_cached_decoding_equals_the_full_pass(variant):
    config, params, tokens_BL = variant
    logits = jax.jit(lambda params: forward(config, params, tokens_BL)[0])(params)
    step = decoding_step(config)  # compiled once for each size of chunk
    apart = layers.apart(config, params)
    for chunks in CHUNKS:
        assert relative_error(decode(config, apart, tokens_BL, chunks, step), logits) < TOLERANCE["float64"], chunks


@pytest.mark.parametrize("name", KINDS_OF_ATTENTION)
def test_padding_before_a_prompt_changes_nothing(name, x64):
    """Decoding pads shorter prompts on the left, with segment 0 (models/decoding.py)."""
    config = in_float64(VARIANTS[name])
    params = random_params(config)
    tokens_BL = tokens_for(config)
    logits, _ = forward(config, params, tokens_BL)
    padded_BL = np.pad(tokens_BL, ((0, 0), (PADDING, 0)))
    segments_BL = np.broadcast_to(np.arange(PADDING + LENGTH) >= PADDING, padded_BL.shape).astype(np.int32)
    model = transformer.bind(config, layers.apart(config, params))
    pieces = []
    caches = model.init_caches(BATCH, PADDING + LENGTH)
    for part in (slice(0, -1), slice(-1, None)):
        positions_BL = np.maximum(np.cumsum(segments_BL, 1) - 1, 0)[:, part]
        start = PADDING + LENGTH - 1 if part.start else 0
        ctx = Context(positions_BL, segments_BL[:, part], cache_index=start, cache_segments_BS=segments_BL)
        out = model(padded_BL[:, part], ctx, caches)
        pieces.append(model.logits(out.hidden_BLD))
        caches = out.caches
    actual = jnp.concatenate(pieces, 1)[:, PADDING:]
    assert relative_error(actual, logits) < TOLERANCE["float64"]


def test_scanned_cached_decoding_equals_the_full_pass(x64):
    config = in_float64(VARIANTS["pattern-repeated"])
    params = random_params(config)
    tokens_BL = tokens_for(config)
    logits, _ = forward(config, params, tokens_BL)
    decoded = decode(config, params, tokens_BL, (LENGTH - 1, 1), decoding_step(config))
    assert relative_error(decoded, logits) < TOLERANCE["float64"]
