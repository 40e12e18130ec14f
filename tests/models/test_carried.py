"""Values that travel between layers: those of a patch, and those of the first layer."""

from dataclasses import replace

import numpy as np
import pytest

from tests.contracts.passes import capture, forward
from tests.contracts.variants import ALL, in_float64, random_params, tokens_for
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error

HYPER = in_float64(ALL["layout=hyper_connections"])
BLOCKS = in_float64(ALL["layout=attention_residuals_blocks"])


@pytest.mark.parametrize("sublayer", ["blocks.0.attention", "blocks.1.feed_forward"])
def test_a_change_of_x_is_shared_equally_by_the_streams(sublayer, x64):
    """At a sublayer in the middle, and at the last one, after which the head reads x."""
    params, tokens_BL = random_params(HYPER), tokens_for(HYPER)

    def final(**changes):
        patches = {f"{sublayer}.{value}": change for value, change in changes.items()}
        return capture(HYPER, params, tokens_BL, ["final"], replace=patches)[0]

    factor_D = np.linspace(0, 1, HYPER.width)
    of_x = final(residual=lambda x_BLD: (1 + factor_D) * x_BLD)  # x is the sum of two streams
    of_streams = final(streams=lambda h_BLXD: h_BLXD + factor_D / 2 * h_BLXD.sum(2, keepdims=True))
    assert relative_error(of_x, of_streams) < TOLERANCE["float64"]
    assert relative_error(of_x, final()) > 1e-3


AT = {"blocks.0.attention": 1, "blocks.1.attention": 1, "blocks.1.feed_forward": 2}


@pytest.mark.parametrize(("sublayer", "last"), AT.items())
def test_a_change_of_x_is_one_of_the_last_source(sublayer, last, x64):
    """Three outputs make a source: the first and the third sublayer add to source 1, the fourth to source 2."""
    params, tokens_BL = random_params(BLOCKS), tokens_for(BLOCKS)

    def final(**changes):
        patches = {f"{sublayer}.{value}": change for value, change in changes.items()}
        return capture(BLOCKS, params, tokens_BL, ["final"], replace=patches)[0]

    factor_D = np.linspace(0, 1, BLOCKS.width)
    of_x = final(residual=lambda x_BLD: (1 + factor_D) * x_BLD)
    of_source = final(sources=lambda v_BLXD: v_BLXD.at[:, :, last].add(factor_D * v_BLXD.sum(2)))
    assert relative_error(of_x, of_source) < TOLERANCE["float64"]
    assert relative_error(of_x, final()) > 1e-3


def test_values_are_mixed_with_those_of_the_first_layer(x64):
    """In the third layer, whose values of the first layer are not those of the layer before it."""
    config = replace(in_float64(ALL["attention.kind=value_residual"]), depth=3)
    params, tokens_BL = random_params(config), tokens_for(config)
    expected = np.stack([reference.model(config, params, tokens)[0] for tokens in tokens_BL])
    for layers in ("scan", "unroll"):
        logits, _ = forward(config, params, tokens_BL, layers=layers)
        assert relative_error(logits, expected) < TOLERANCE["float64"]
