"""A sublayer knows the number of its layer: `ctx.number`, with scanned and unrolled layers, patterns and segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import VARIANTS, random_params, tokens_for
from xfresearch.models import layers, transformer
from xfresearch.models.context import Aux, Context
from xfresearch.models.mixers.softmax.attention import Attention

MODELS = ("base", "pattern", "pattern-repeated", "segments")


@pytest.fixture
def numbers(monkeypatch):
    """Attention reports the number that it reads, as a statistic."""
    original = Attention.__call__

    def call(self, x_BLD, ctx, cache=None):
        y_BLD, cache, aux = original(self, x_BLD, ctx, cache)
        return y_BLD, cache, Aux(aux.losses, {"number": jnp.asarray(ctx.number)})

    monkeypatch.setattr(Attention, "__call__", call)


@pytest.mark.parametrize("mode", ["scan", "unroll"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_reads_its_own_number(name, mode, numbers):
    config = VARIANTS[name]
    tokens_BL = tokens_for(config)
    ctx = Context(np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape))

    def statistics(params):
        return transformer.bind(config, params)(tokens_BL, ctx, layers=mode).statistics

    result = jax.jit(statistics)(random_params(config))
    order = [int(result[layer.stack]["attention"]["number"][layer.index]) for layer in layers.layers(config)]
    assert order == list(range(config.depth))


def test_the_models_have_several_patterns_and_segments():
    """A number that is right by chance in a model of one stack is wrong in these."""
    segments = [layers.segments(VARIANTS[name]) for name in MODELS]
    assert max(map(len, segments)) == 2
    assert max(len(pattern) for each in segments for pattern, _ in each) == 3
    assert any(repeats > 1 and len(pattern) > 1 for each in segments for pattern, repeats in each)
