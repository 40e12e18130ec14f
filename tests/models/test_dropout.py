"""Dropout of the embedding, of the outputs of sublayers, and of attention weights, including those of memory slots."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture, forward
from tests.contracts.variants import VARIANTS, change, model, random_params, tokens_for
from tests.training.test_step import make_batch, make_config
from xfresearch.models.context import Context
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program

SITES = ["dropout", "blocks.main.dropout", "blocks.main.attention.dropout"]
SLOTS = {"blocks.main.attention.kind": "slots", "blocks.main.attention.memory_slots": 32}
DIFFERENTIAL = {"blocks.main.attention.kind": "differential"}
CASES = [
    *(({}, site, site) for site in SITES),
    (SLOTS, SITES[-1], "blocks.main.attention[slots].dropout"),
    (DIFFERENTIAL, SITES[-1], "blocks.main.attention[differential].dropout"),
]
KEY = jax.random.key(3)


def context(key=KEY):
    return Context(positions_BL=None, key=key)


def test_dropout_zeroes_entries_at_its_rate_and_keeps_the_mean():
    x = jnp.ones((400, 500))
    y = context().dropout(x, 0.3, "site")
    zeros = float((y == 0).mean())
    assert zeros == pytest.approx(0.3, abs=0.01)
    assert float(y.mean()) == pytest.approx(1, abs=0.01)
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.7], rtol=1e-6)


def test_dropout_does_nothing_without_a_key_or_a_rate():
    x = jnp.ones((4, 5))
    assert context(key=None).dropout(x, 0.3, "site") is x
    assert context().dropout(x, 0.0, "site") is x
    assert context(key=None).dropout_key("site") is None


def test_dropout_keeps_the_dtype():
    assert context().dropout(jnp.ones((4, 5), jnp.bfloat16), 0.3, "site").dtype == jnp.bfloat16


def test_masks_differ_between_layers_and_sites_and_repeat_for_a_key():
    x = jnp.ones((50, 50))
    sites = ("attention", "feed_forward")
    draws = {(i, site): context().layer(i, "main").dropout(x, 0.5, site) for i in range(3) for site in sites}
    for a in draws:
        for b in draws:
            same = float((draws[a] == draws[b]).mean())
            assert same == 1 if a == b else 0.4 < same < 0.6
    np.testing.assert_array_equal(draws[2, "attention"], context().layer(2, "main").dropout(x, 0.5, "attention"))


@pytest.mark.parametrize(
    "changes, site", [pytest.param(*case, marks=pytest.mark.covers(path), id=path) for *case, path in CASES]
)
def test_every_site_depends_on_the_key_and_is_off_without_one(changes, site):
    config = model(changes | {site: 0.5})
    plain = model(changes)
    params = random_params(config)
    tokens_BL = tokens_for(config)
    keys = (KEY, KEY, jax.random.key(4), None)
    first, again, other, off = (forward(config, params, tokens_BL, key=key)[0] for key in keys)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, off)
    np.testing.assert_array_equal(off, forward(plain, params, tokens_BL)[0])


def test_scanned_and_unrolled_layers_have_the_same_masks():
    config = model({site: 0.3 for site in SITES})
    params = random_params(config)
    tokens_BL = tokens_for(config)
    unrolled, scanned = (forward(config, params, tokens_BL, layers, key=KEY)[0] for layers in ("unroll", "scan"))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-4, atol=1e-5)


def test_the_out_tap_of_a_sublayer_is_after_dropout():
    config = model({"blocks.main.dropout": 0.5})
    names = [f"blocks.{i}.{s}.out" for i in range(2) for s in ("attention", "feed_forward")]
    values = capture(config, random_params(config), tokens_for(config, 8, 32), names, key=KEY)
    zeros = [np.asarray(value == 0) for value in values]
    for z in zeros:
        assert z.mean() == pytest.approx(0.5, abs=0.03)
    assert all((a != b).any() for i, a in enumerate(zeros) for b in zeros[:i])


def test_the_embed_tap_is_after_dropout():
    config = model({"dropout": 0.5})
    (embed_BLD,) = capture(config, random_params(config), tokens_for(config, 8, 32), ["embed"], key=KEY)
    assert float((embed_BLD == 0).mean()) == pytest.approx(0.5, abs=0.03)


PIECE = 256  # bits of a mask that are compared: one head, or half of a sequence's [16, 32]


@pytest.fixture
def draws(monkeypatch):
    """Records all random draws of the model, also in a compiled loop, as bits. At a rate of 0.5, half are 0."""
    masks = []

    def spy(name):
        draw = getattr(jax.random, name)

        def spied(*args):
            x = draw(*args)
            jax.debug.callback(lambda x: masks.append(np.ravel(x < 1)), x)
            return x

        monkeypatch.setattr(jax.random, name, spied)

    spy("bernoulli")  # masks
    spy("uniform")  # jitter, 0.5 to 1.5; in float32 it is below 1 for the random bits that make a mask 0
    return masks


def assert_independent(draws, count: int):
    """Asserts that no two pieces of the `count` draws are equal or correlated: layers, sites, microbatches, steps,
    sequences and heads. Draws of different shapes from the same key would start with the same bits."""
    jax.effects_barrier()
    assert len(draws) == count
    signs = 2.0 * np.concatenate([bits.reshape(-1, PIECE) for bits in draws]) - 1
    correlation = signs @ signs.T / PIECE - np.eye(len(signs))
    assert np.abs(correlation).max() < 0.5  # eight standard deviations


def noisy(config):
    """`config` with every dropout rate and the jitter of its routers at 0.5."""
    rates = {"dropout": 0.5}
    for name, block in config.blocks.items():
        jitter = ["feed_forward.moe.jitter"] if block.feed_forward.kind == "moe" else []
        rates |= {f"blocks.{name}.{field}": 0.5 for field in ["dropout", "attention.dropout", *jitter]}
    return model(rates, config)


@pytest.mark.parametrize("layers", ["scan", pytest.param("unroll", marks=pytest.mark.long)])
def test_all_draws_of_a_pattern_are_independent(layers, draws):
    config = noisy(VARIANTS["pattern"])
    forward(config, random_params(config), tokens_for(config, 4, 16), layers, key=KEY)
    assert_independent(draws, 1 + config.depth * 3 + config.depth // 2)


def test_draws_of_microbatches_and_steps_are_independent(draws):
    config = make_config(accumulate=2)
    config = replace(config, sequence_length=16, model=noisy(change(config.model, "width", 32)))
    program = Program(config)
    state, step = program.init(hyper_of(config)), jax.jit(program.update)
    for _ in range(2):
        state, _ = step(state, make_batch([16] * 8, L=16))
    assert_independent(draws, 2 * 2 * (1 + config.model.depth * 3))


@pytest.mark.parametrize("name", ["weights", "coefficients"])
def test_weights_of_tokens_and_slots_have_dropout(name):
    """Factors are 0 or 1 / (1 - rate). Slots share the tokens' softmax and its dropout (Sukhbaatar et al. 2019)."""
    config = model({"blocks.main.attention.memory_slots": 32, "blocks.main.attention.dropout": 0.3})
    params = random_params(config)
    tokens_BL = tokens_for(config, 8, 32)

    def weights(key):
        (value,) = capture(config, params, tokens_BL, [f"blocks.0.attention.{name}"], key=key)
        return np.ravel(value)

    dropped, whole = weights(KEY), weights(None)
    factors = dropped[whole > 0] / whole[whole > 0]
    np.testing.assert_allclose(factors[factors > 0], 1 / 0.7, rtol=1e-5)
    assert (factors == 0).mean() == pytest.approx(0.3, abs=0.02)
    assert factors.mean() == pytest.approx(1, abs=0.03)
