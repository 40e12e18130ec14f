"""LayerNorm taken apart: each half differs from it in exactly one thing (Brody et al. 2023)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import MAIN, change, forward, model, random_params, tokens_for
from xfresearch.models import norms

D, EPSILON = 64, 0.0


@pytest.fixture
def x(x64):
    return jnp.asarray(3 * np.random.default_rng(0).standard_normal((50, D)) + 2)


def length(x):
    return np.linalg.norm(x, axis=-1)


def test_layer_norm_is_scaling_after_projection(x):
    np.testing.assert_allclose(norms.layer(x, EPSILON), norms.scale(norms.project(x, EPSILON), EPSILON), rtol=1e-12)


def test_scaling_alone_leaves_the_direction_and_has_the_length_of_layer_norm(x):
    """sqrt(D), not the 1/sqrt(D) of the published code, which makes logits D^2 times smaller in that arm alone."""
    scaled = norms.scale(x, EPSILON)
    np.testing.assert_allclose(length(scaled), np.sqrt(D), rtol=1e-12)
    np.testing.assert_allclose(length(norms.layer(x, EPSILON)), np.sqrt(D), rtol=1e-12)
    np.testing.assert_allclose(scaled / length(scaled)[:, None], x / length(x)[:, None], rtol=1e-12)
    assert np.abs(scaled.mean(-1)).min() > 0.1  # the mean is still there


def test_projection_alone_takes_out_the_mean_and_nothing_else(x):
    projected = norms.project(x, EPSILON)
    np.testing.assert_allclose(projected.mean(-1), 0, atol=1e-12)
    removed = x - projected
    np.testing.assert_allclose(removed, removed[:, :1] * np.ones(D), rtol=1e-12)
    np.testing.assert_allclose(length(projected) ** 2 + length(removed) ** 2, length(x) ** 2, rtol=1e-12)
    assert np.std(length(projected)) > 0.1  # lengths still differ


@pytest.mark.parametrize("kind", ["scale", "project"])
def test_an_arm_differs_from_layer_norm_in_the_norm_alone(kind):
    """Same parameters, same everything else: where inputs have no mean and length sqrt(D), both are LayerNorm."""
    layer, arm = model(), model({"blocks.main.norm": kind})
    differing = {
        name for name, value in vars(layer.blocks["main"]).items() if value != getattr(arm.blocks["main"], name)
    }
    assert differing == {"norm"}
    params = random_params(layer)
    assert not np.allclose(forward(layer, params, tokens_for(layer))[0], forward(arm, params, tokens_for(layer))[0])
    x = norms.layer(jnp.asarray(np.random.default_rng(1).standard_normal((5, D))), 1e-12)
    np.testing.assert_allclose(
        norms.layer(x, 0.0), {"scale": norms.scale, "project": norms.project}[kind](x, 0.0), atol=1e-5
    )


def test_an_offset_changes_where_gains_start_and_nothing_else():
    """Gemma's gains start at 0; SoLU's own norm is left as it is."""
    from xfresearch.models import transformer

    changes = {"embedding_norm": "rms", "blocks.main.attention.qk_norm": "rms", "blocks.main.feed_forward.kind": "solu"}
    plain, moved = model(changes), model(changes | {"blocks.main.norm_offset": 1.0})
    params, found = (transformer.init(config, jax.random.key(0)) for config in (plain, moved))
    for where in (found["embedding_norm"], found["final_norm"], found["blocks"]["main"]["attention"]["key_norm"]):
        assert not where["gain"].any()
    assert (found["blocks"]["main"]["feed_forward"]["hidden_norm"]["gain"] == 1).all()
    tokens_BL = tokens_for(plain)
    np.testing.assert_array_equal(forward(moved, found, tokens_BL)[0], forward(plain, params, tokens_BL)[0])


def test_gain_bias_and_alpha_are_there_as_asked():
    from xfresearch.models import transformer

    for kind, gain, bias in [
        ("rms", True, True),
        ("layer", False, True),
        ("dyt", False, False),
        ("project", True, False),
    ]:
        block = change(change(change(MAIN, "norm", kind), "norm_gain", gain), "norm_bias", bias)
        params = transformer.abstract(model({"blocks": {"main": block}}))["blocks"]["main"]
        found = set(params.get("attention_norm_in", {}))
        wanted = [("gain", gain), ("bias", bias), ("alpha", kind == "dyt")]
        assert found == {name for name, there in wanted if there}
