"""The two halves of LayerNorm, projection and scaling (Brody et al. 2023), and the options of norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import MAIN, change, model, random_params, tokens_for
from xfresearch.models import norms

D, EPSILON = 64, 0.0


@pytest.fixture
def x(x64):
    return jnp.asarray(3 * np.random.default_rng(0).standard_normal((50, D)) + 2)


def length(x):
    return np.linalg.norm(x, axis=-1)


def test_layer_norm_is_scaling_after_projection(x):
    np.testing.assert_allclose(norms.layer(x, EPSILON), norms.scale(norms.project(x, EPSILON), EPSILON), rtol=1e-12)


def test_scaling_keeps_the_direction_and_has_the_length_of_layer_norm(x):
    """sqrt(D). The published code has 1/sqrt(D), which makes only this variant's logits D^2 times smaller."""
    scaled = norms.scale(x, EPSILON)
    np.testing.assert_allclose(length(scaled), np.sqrt(D), rtol=1e-12)
    np.testing.assert_allclose(length(norms.layer(x, EPSILON)), np.sqrt(D), rtol=1e-12)
    np.testing.assert_allclose(scaled / length(scaled)[:, None], x / length(x)[:, None], rtol=1e-12)
    assert np.abs(scaled.mean(-1)).min() > 0.1  # the mean is still there


def test_projection_removes_only_the_mean(x):
    projected = norms.project(x, EPSILON)
    np.testing.assert_allclose(projected.mean(-1), 0, atol=1e-12)
    removed = x - projected
    np.testing.assert_allclose(removed, removed[:, :1] * np.ones(D), rtol=1e-12)
    np.testing.assert_allclose(length(projected) ** 2 + length(removed) ** 2, length(x) ** 2, rtol=1e-12)
    assert np.std(length(projected)) > 0.1  # lengths still differ


@pytest.mark.parametrize("kind", ["scale", "project"])
def test_a_half_of_layer_norm_changes_only_the_norm_of_a_config(kind):
    """All other options are equal. For inputs with mean 0 and length sqrt(D), each half equals LayerNorm."""
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


def test_an_offset_changes_only_the_initial_gains():
    """With the offset 1 (Gemma), gains start at 0. The norm inside SoLU has no offset."""
    from xfresearch.models import transformer

    changes = {"embedding_norm": "rms", "blocks.main.attention.qk_norm": "rms", "blocks.main.feed_forward.kind": "solu"}
    plain, moved = model(changes), model(changes | {"blocks.main.norm_offset": 1.0})
    params, found = (transformer.init(config, jax.random.key(0)) for config in (plain, moved))
    for where in (found["embedding_norm"], found["final_norm"], found["blocks"]["main"]["attention"]["key_norm"]):
        assert not where["gain"].any()
    assert (found["blocks"]["main"]["feed_forward"]["hidden_norm"]["gain"] == 1).all()
    tokens_BL = tokens_for(plain)
    np.testing.assert_array_equal(forward(moved, found, tokens_BL)[0], forward(plain, params, tokens_BL)[0])


def test_a_norm_has_exactly_the_parameters_of_its_options():
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
