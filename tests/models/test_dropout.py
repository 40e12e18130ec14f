"""Dropout: of the embedding, of what sublayers write, and of attention weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import forward, model, random_params, tokens_for
from xfresearch.models.context import Context
from xfresearch.models.taps import Taps

SITES = ["dropout", "blocks.main.dropout", "blocks.main.attention.dropout"]
KEY = jax.random.key(3)


def context(key=KEY):
    return Context(positions_BL=None, key=key)


def test_zeroes_at_the_rate_and_keeps_the_mean():
    x = jnp.ones((400, 500))
    y = context().dropout(x, 0.3, "site")
    zeros = float((y == 0).mean())
    assert zeros == pytest.approx(0.3, abs=0.01)
    assert float(y.mean()) == pytest.approx(1, abs=0.01)
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.7], rtol=1e-6)


def test_does_nothing_without_a_key_or_a_rate():
    x = jnp.ones((4, 5))
    assert context(key=None).dropout(x, 0.3, "site") is x
    assert context().dropout(x, 0.0, "site") is x
    assert context(key=None).dropout_key("site") is None


def test_keeps_the_dtype():
    assert context().dropout(jnp.ones((4, 5), jnp.bfloat16), 0.3, "site").dtype == jnp.bfloat16


def test_draws_differ_between_layers_and_sites_and_repeat_for_a_key():
    x = jnp.ones((50, 50))
    draws = {
        (i, site): context().layer(i).dropout(x, 0.5, site) for i in range(3) for site in ("attention", "feed_forward")
    }
    for a in draws:
        for b in draws:
            same = float((draws[a] == draws[b]).mean())
            assert same == 1 if a == b else 0.4 < same < 0.6
    np.testing.assert_array_equal(draws[2, "attention"], context().layer(2).dropout(x, 0.5, "attention"))


@pytest.mark.parametrize("site", SITES)
def test_every_site_draws_by_key_and_is_off_without_one(site):
    config, plain = model({site: 0.5}), model()
    params, tokens_BL = random_params(config), tokens_for(config)
    keys = (KEY, KEY, jax.random.key(4), None)
    first, again, other, off = (forward(config, params, tokens_BL, key=key)[0] for key in keys)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, off)
    np.testing.assert_array_equal(off, forward(plain, params, tokens_BL)[0])


def test_scanned_and_unrolled_layers_draw_the_same():
    config = model({site: 0.3 for site in SITES})
    params, tokens_BL = random_params(config), tokens_for(config)
    unrolled, scanned = (forward(config, params, tokens_BL, layers, key=KEY)[0] for layers in ("unroll", "scan"))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-4, atol=1e-5)


def test_what_a_sublayer_writes_is_dropped_where_its_tap_sees_it():
    config = model({"blocks.main.dropout": 0.5})
    names = [f"blocks.{i}.{s}.out" for i in range(2) for s in ("attention", "feed_forward")]
    taps = Taps(record=names)
    forward(config, random_params(config), tokens_for(config, 8, 32), key=KEY, taps=taps)
    zeros = [np.asarray(taps.values[name] == 0) for name in names]
    for z in zeros:
        assert z.mean() == pytest.approx(0.5, abs=0.03)
    assert all((a != b).any() for i, a in enumerate(zeros) for b in zeros[:i])


def test_embedding_dropout_is_in_the_embed_tap():
    config, taps = model({"dropout": 0.5}), Taps(record=["embed"])
    forward(config, random_params(config), tokens_for(config, 8, 32), key=KEY, taps=taps)
    assert float((taps.values["embed"] == 0).mean()) == pytest.approx(0.5, abs=0.03)
