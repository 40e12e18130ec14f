"""A network that is run layer by layer computes what the whole model computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch.models.inputs import forward
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import Patch, request
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import assemble, take_apart

BLOCK = "model__blocks__main__"
MODELS = {
    "llama": {BLOCK + "attention__position": "t5"},
    "moe": {},
    "all_attention": {},
    "vanilla_2017_decoder": {BLOCK + "layout": "resi_dual", "model__final_norm": "layer"},
}


def loss(model: ModelConfig, params: dict, tokens_BL, scale_BL):
    taps = request(model, patches={"embed": Patch(lambda x_BLD: x_BLD * scale_BL[..., None])})
    lm, out = forward(model, params, tokens_BL, taps)
    log_p_BLV = jax.nn.log_softmax(lm.logits(out.hidden_BLD)[:, :-1])
    return -jnp.take_along_axis(log_p_BLV, tokens_BL[:, 1:, None], -1).mean()


@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_whole_model(name):
    lm = tiny_model(name, **MODELS[name])
    tokens_BL = np.random.default_rng(0).integers(257, size=(2, 12))
    network = take_apart(lm.config, lm.params)
    with jax.enable_x64(True):
        runner = Runner(network, "float64")
        result = runner.run(tokens_BL, 3)
        model, params = runner.model, assemble(network, "float64")[1]
        whole, out = forward(model, params, jnp.asarray(tokens_BL))
        expected = whole.logits(out.hidden_BLD)
        gradient = jax.grad(loss, 3)(model, params, jnp.asarray(tokens_BL), jnp.ones(tokens_BL.shape))
        np.testing.assert_allclose(result.logits_BLV, expected, rtol=0, atol=1e-12 * abs(expected).max())
        np.testing.assert_allclose(result.cached_BCV, expected[:, -3:], rtol=0, atol=1e-12 * abs(expected).max())
        own = runner.gradient(tokens_BL, result.streams)
        np.testing.assert_allclose(own, gradient, rtol=0, atol=1e-12 * abs(gradient).max())


def test_parameters_are_restored_bit_for_bit():
    lm = tiny_model("gpt2")
    model, params = assemble(take_apart(lm.config, lm.params), "float32")
    assert model == lm.config
    jax.tree.map(np.testing.assert_array_equal, params, lm.params)
