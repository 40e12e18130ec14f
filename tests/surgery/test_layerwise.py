"""A network that is run layer by layer computes what the whole model computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.two_stacks import MODELS as MODELS_WITH_AN_ENCODER
from tests.contracts.two_stacks import source_for
from tests.contracts.variants import random_params
from tests.tiny_runs import tiny_model
from xfresearch.models.inputs import forward
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import NO_TAPS, Patch, request
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import assemble, take_apart

BLOCK = "model__blocks__main__"
MODELS = {
    "llama": {BLOCK + "attention__position": "t5"},
    "moe": {},
    "all_attention": {},
    "vanilla_2017_decoder": {BLOCK + "layout": "resi_dual", "model__final_norm": "layer"},
}


def loss(model: ModelConfig, params: dict, tokens_BL, scale_BL, source=None, scale_BS=None):
    patches = {"embed": Patch(lambda x_BLD: x_BLD * scale_BL[..., None])}
    if source:
        patches["encoder.embed"] = Patch(lambda x_BSW: x_BSW * scale_BS[..., None])
    lm, out = forward(model, params, tokens_BL, request(model, patches=patches), None, None, source)
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
        own = runner.gradient(tokens_BL, result)
        np.testing.assert_allclose(own, gradient, rtol=0, atol=1e-12 * abs(gradient).max())


@pytest.mark.long
@pytest.mark.parametrize("name", ["in-turns", "relative", "merged"])
def test_it_equals_a_model_with_two_stacks(name):
    config = MODELS_WITH_AN_ENCODER[name]
    network, source = take_apart(config, random_params(config)), source_for(config)
    tokens_BL = jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(len(source.tokens_BS), 12)))
    with jax.enable_x64(True):
        runner = Runner(network, "float64")
        result = runner.run(tokens_BL, 3, source_BS=source.tokens_BS)
        model, params = runner.model, assemble(network, "float64")[1]
        whole, out = forward(model, params, tokens_BL, NO_TAPS, None, None, source)
        expected = whole.logits(out.hidden_BLD)
        scales = jnp.ones(tokens_BL.shape), jnp.ones(source.tokens_BS.shape)
        of_loss = jax.grad(lambda scale_BL, scale_BS: loss(model, params, tokens_BL, scale_BL, source, scale_BS), (0, 1))
        gradient = np.concatenate(of_loss(*scales), 1)
        np.testing.assert_allclose(result.logits_BLV, expected, rtol=0, atol=1e-12 * abs(expected).max())
        np.testing.assert_allclose(result.cached_BCV, expected[:, -3:], rtol=0, atol=1e-12 * abs(expected).max())
        own = runner.gradient(tokens_BL, result)
        np.testing.assert_allclose(own, gradient, rtol=0, atol=1e-12 * abs(gradient).max())


@pytest.mark.parametrize("name", ["pre-norm", "merged"])
def test_parameters_of_two_stacks_are_restored_bit_for_bit_without_a_mistake(name):
    config = MODELS_WITH_AN_ENCODER[name]
    params = random_params(config)
    model, restored = assemble(take_apart(config, params), "float32")
    assert model == config
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_parameters_are_restored_bit_for_bit():
    lm = tiny_model("gpt2")
    model, params = assemble(take_apart(lm.config, lm.params), "float32")
    assert model == lm.config
    jax.tree.map(np.testing.assert_array_equal, params, lm.params)
