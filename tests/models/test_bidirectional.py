"""Models that are not causal, for use as a library: every position sees every other; training one is refused."""

import jax
import jax.numpy as jnp
import pytest

from tests.contracts.variants import forward, in_float64, model, random_params, tokens_for
from xfresearch.config_io import parse
from xfresearch.errors import UserError
from xfresearch.models.taps import Taps


def test_every_position_sees_every_other(x64):
    config = in_float64(model({"causal": False}))
    params, tokens_BL = random_params(config), tokens_for(config)

    def logits(shift_BLD):
        return forward(config, params, tokens_BL, taps=Taps(replace={"embed": lambda x_BLD: x_BLD + shift_BLD}))[0]

    gradient_BLD = jax.grad(lambda shift: logits(shift)[0, 2].sum())(jnp.zeros((*tokens_BL.shape, config.width)))
    assert (jnp.abs(gradient_BLD[0]).max(-1) > 0).all() and not gradient_BLD[1].any()


def test_training_one_is_refused_with_the_reason():
    with pytest.raises(
        UserError, match="model.causal=False .* a model that sees the tokens it predicts learns nothing"
    ):
        parse(["--config", "configs/gpt2.py:tiny", "--config.model.causal=False"])
