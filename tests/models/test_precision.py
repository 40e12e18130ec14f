"""dtype is the dtype of the computation, param_dtype the dtype of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture, run
from tests.contracts.variants import NAMED, change, marked, random_params, tokens_for
from tests.contracts.variants import model as resolved
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.models.norms import Norm
from xfresearch.models.taps import captured

# One config of each kind; the others consist of the same parts.
DEFAULT_RUN = ("gpt2", "llama", "moe", "all_attention", "lambda_lm", "simplified")

@pytest.mark.parametrize("name", marked(DEFAULT_RUN, NAMED))
def test_bfloat16_is_close_to_float32_with_the_same_parameters(name):
    """Compares the residual stream after the first layer of each kind. Later, norms of small streams, products of
    several inputs and the router's choices amplify rounding errors; that is not the arithmetic of a layer."""
    config = NAMED[name]
    low = change(config, "dtype", "bfloat16")
    params = transformer.init(config, jax.random.key(0))
    tokens_BL = tokens_for(config)
    assert jax.tree.leaves(transformer.abstract(low))[0].dtype == jnp.float32
    streams = {}
    for each in (low, config):
        names = [f"blocks.{layer}.attention.residual" for layer in range(len(config.pattern))]
        model, out = run(each, params, tokens_BL, record=names)
        assert model.logits(out.hidden_BLD).dtype == jnp.float32
        streams[each.dtype] = [value.astype(jnp.float32) for value in captured(each, out.captures, names).values()]
    for actual, expected in zip(streams["bfloat16"], streams["float32"], strict=True):
        assert 1e-4 < relative_error(actual, expected) < TOLERANCE["bfloat16"]  # above 1e-4: bfloat16 was used


@pytest.mark.parametrize(
    "dtype, param_dtype",
    [
        ("float32", "float32"),
        pytest.param("bfloat16", "float32", marks=pytest.mark.covers("dtype")),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.covers("dtype", "param_dtype")),
    ],
)
def test_activations_have_dtype_and_parameters_param_dtype(dtype, param_dtype):
    config = change(change(NAMED["moe"], "dtype", dtype), "param_dtype", param_dtype)
    params = transformer.init(config, jax.random.key(0))
    model = transformer.bind(config, params)
    ctx = Context(jnp.broadcast_to(jnp.arange(8), (2, 8)))
    out = jax.eval_shape(lambda: model(tokens_for(config), ctx, model.init_caches(2, 8)))
    assert out.hidden_BLD.dtype == dtype
    assert out.caches["main"]["attention"]["key"].dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}


def test_the_router_is_computed_in_float32_under_bfloat16():
    config = change(NAMED["moe"], "dtype", "bfloat16")
    names = ["blocks.0.feed_forward.router_logits"]
    (logits_BLE,) = capture(config, random_params(config), tokens_for(config), names)
    assert logits_BLE.dtype == jnp.float32


@pytest.mark.covers("blocks.main.norm_cast")
def test_norm_cast_selects_where_a_norm_rounds():
    """Gemma multiplies by the gain in float32 and then rounds; Llama rounds first. They differ in the last bits."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), jnp.bfloat16)
    gain = jnp.asarray(1 + 0.3 * np.random.default_rng(1).standard_normal(32), jnp.float32)
    wide = np.asarray(x, np.float32)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    expected = {
        "after_gain": jnp.asarray(normed * gain, jnp.bfloat16),
        "before_gain": jnp.asarray(normed, jnp.bfloat16) * jnp.asarray(gain, jnp.bfloat16),
    }
    for cast, want in expected.items():
        block = resolved({"blocks.main.norm": "rms", "blocks.main.norm_cast": cast}).blocks["main"]
        norm = Norm(block.norm_at("attention_in"), "D", (32,), "float32")
        norm.gain[...] = gain
        same = np.asarray(norm(x) == want).mean()
        other = np.asarray(norm(x) == expected[{"after_gain": "before_gain", "before_gain": "after_gain"}[cast]]).mean()
        assert same > 0.99 > 0.95 > other, cast
