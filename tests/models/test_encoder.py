"""Models with an encoder and a decoder: values, costs, masks of pairs, padding, decoding with a cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward, run
from tests.contracts.variants import BATCH, LENGTH, in_float64, random_params, tokens_for
from tests.daily import daily
from tests.models.two_stacks import MODELS, SOURCE, packed, source_for
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context, Source
from xfresearch.models.counting import count_flops
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.taps import captured
from xfresearch.run.closed_form import costs


def case(name: str) -> tuple:
    """A model in float64, its parameters, and tokens."""
    config = in_float64(MODELS[name])
    return config, random_params(config), tokens_for(config)


@pytest.mark.parametrize("name", MODELS)
def test_every_tap_of_packed_pairs_equals_the_reference(name, x64):
    config, params, tokens_BL = case(name)
    names, context = tap_shapes(config), packed(config)
    actual = captured(config, run(config, params, tokens_BL, record=names, **context)[1].captures, names)
    _, values = reference.passed(config, params, tokens_BL, **context)
    assert actual.keys() <= values.keys()
    assert {f"encoder.blocks.{config.encoder.depth - 1}.attention.weights", "encoder.final", "embed"} <= actual.keys()
    for tap, value in actual.items():
        assert relative_error(value, values[tap]) < TOLERANCE["float64"], tap


@pytest.mark.parametrize("name", MODELS)
def test_costs_equal_the_counts(name):
    config = MODELS[name]
    tokens_BL, source = np.zeros((BATCH, LENGTH), np.int32), source_for(config)
    count = partial(forward, config, tokens_BL=tokens_BL, source=source)
    params = transformer.abstract(config)
    assert costs(config).parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count_flops(lambda params: count(params), params) == BATCH * LENGTH * costs(config, LENGTH).flops_per_token


@pytest.mark.parametrize("name", ["pre-norm", "experts"])
def test_scanned_equals_unrolled_with_all_results(name, x64):
    config, params, tokens_BL = case(name)
    context = packed(config)
    unrolled, losses = forward(config, params, tokens_BL, "unroll", **context)
    scanned, others = forward(config, params, tokens_BL, "scan", **context)
    assert relative_error(scanned, unrolled) < TOLERANCE["float64"]
    assert losses.keys() == others.keys()
    assert all(relative_error(others[each], losses[each]) < TOLERANCE["float64"] for each in losses)
    assert bool(losses) == (name == "experts")  # those of the encoder's experts


def test_padding_of_the_source_changes_nothing(x64):
    config, params, tokens_BL = case("merged")
    source = source_for(config)
    logits, _ = forward(config, params, tokens_BL, source=source)
    for before, after in ((0, 2), (3, 1)):
        pads = ((0, 0), (before, after))
        tokens_BS = np.pad(source.tokens_BS, pads, constant_values=5)
        segments_BS = np.pad(np.ones_like(source.tokens_BS), pads)
        positions_BS = np.maximum(np.cumsum(segments_BS, 1) - 1, 0)
        padded, _ = forward(config, params, tokens_BL, source=Source(tokens_BS, segments_BS, positions_BS))
        assert relative_error(padded, logits) < TOLERANCE["float64"]


def test_logits_depend_on_each_token_of_their_own_source_alone(x64):
    config, params, tokens_BL = case("pre-norm")
    context = packed(config)

    def logits(shift_BSW):
        change = {"encoder.embed": lambda x_BSW: x_BSW + shift_BSW}
        return forward(config, params, tokens_BL, replace=change, **context)[0]

    _, vjp = jax.vjp(logits, jnp.zeros((BATCH, SOURCE, config.encoder.width)))
    weights_V = np.random.default_rng(0).standard_normal(config.vocab_size)
    segments_BS, segments_BL = context["source"].segments_BS, context["segments_BL"]
    for position in (0, 3, LENGTH // 2 + 1):
        cotangent_BLV = np.zeros((BATCH, LENGTH, config.vocab_size))
        cotangent_BLV[0, position] = weights_V
        gradient_BS = np.abs(vjp(jnp.asarray(cotangent_BLV))[0]).max(-1)
        assert not gradient_BS[1:].any()
        assert ((gradient_BS[0] > 0) == (segments_BS[0] == segments_BL[0, position])).all()


DECODED = [("pre-norm", True), ("pre-norm", False), ("key-is-value", True), ("all-attention", True), ("no-key", True)]


@pytest.mark.parametrize("name, apart", daily(DECODED[:3], DECODED))
def test_cached_decoding_equals_the_full_pass(name, apart, x64):
    config, params, tokens_BL = case(name)
    segments_BS = np.array([[1] * SOURCE, [1] * (SOURCE - 2) + [0] * 2], np.int32)
    source = source_for(config)._replace(segments_BS=segments_BS)
    logits = jax.jit(lambda params: forward(config, params, tokens_BL, source=source)[0])(params)
    params = layers.apart(config, params) if apart else params
    assert relative_error(decoded(config, params, source, tokens_BL), logits) < TOLERANCE["float64"]


def decoded(config, params, source: Source, tokens_BL):
    """Logits from caches that have the keys and values of the source at once, and those of the tokens chunk by chunk."""

    @jax.jit
    def begin(params):
        lm = transformer.bind(config, params)
        ctx, _ = lm.encoded(Context(None, source=source))
        return lm.init_caches(BATCH, LENGTH + 2, ctx)

    @jax.jit
    def step(params, tokens_BC, start, caches):
        lm = transformer.bind(config, params)
        positions_BC = jnp.broadcast_to(start + jnp.arange(tokens_BC.shape[1]), tokens_BC.shape)
        ctx = Context(positions_BC, cache_index=start, source=Source(None, source.segments_BS))
        out = lm(tokens_BC, ctx, caches)
        return lm.logits(out.hidden_BLD), out.caches

    caches, pieces, start = begin(params), [], 0
    for size in (5, 1, 1, 1):
        logits_BCV, caches = step(params, tokens_BL[:, start : start + size], start, caches)
        pieces.append(logits_BCV)
        start += size
    return jnp.concatenate(pieces, 1)
