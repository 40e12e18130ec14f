"""The two halves of LayerNorm, projection and scaling (Brody et al. 2023), and the options of norms."""

import math

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
    params, actual = (transformer.init(config, jax.random.key(0)) for config in (plain, moved))
    for where in (actual["embedding_norm"], actual["final_norm"], actual["blocks"]["main"]["attention"]["key_norm"]):
        assert not where["gain"].any()
    assert (actual["blocks"]["main"]["feed_forward"]["hidden_norm"]["gain"] == 1).all()
    tokens_BL = tokens_for(plain)
    np.testing.assert_array_equal(forward(moved, actual, tokens_BL)[0], forward(plain, params, tokens_BL)[0])


def test_a_norm_has_exactly_the_parameters_of_its_options():
    from xfresearch.models import transformer

    for kind, gain, bias in [
        ("rms", True, True),
        ("layer", False, True),
        ("dyt", False, False),
        ("derf", False, True),
        ("project", True, False),
    ]:
        block = change(change(change(MAIN, "norm", kind), "norm_gain", gain), "norm_bias", bias)
        params = transformer.abstract(model({"blocks": {"main": block}}))["blocks"]["main"]
        result = set(params.get("attention_norm_in", {}))
        wanted = [("gain", gain), ("bias", bias), ("alpha", kind in ("dyt", "derf")), ("shift", kind == "derf")]
        assert result == {name for name, there in wanted if there}


def test_derf_is_its_equation_with_2_d_plus_2_parameters(x):
    """Chen et al. 2025: gain * erf(alpha x + shift) + bias; alpha and the shift are one number each."""
    norm = filled("derf")
    gain, bias, alpha, shift = (np.asarray(value[...]) for value in (norm.gain, norm.bias, norm.alpha, norm.shift))
    assert gain.size + bias.size + alpha.size + shift.size == norm.spec.costs(D).parameters == 2 * D + 2
    expected = gain * np.vectorize(math.erf)(alpha * np.asarray(x) + shift) + bias
    np.testing.assert_allclose(norm(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", norms.NORMS)
def test_a_frozen_norm_is_the_norm_at_its_value_and_linear(kind, x64):
    norm = filled(kind, epsilon=0.1)
    at, x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, D)))
    constant = 0 if norm.constant() is None else norm.constant()
    np.testing.assert_allclose(norm.frozen(at, at) + constant, norm(at), rtol=1e-12, atol=1e-12)
    parts = norm.frozen(at, at) + 2 * norm.frozen(x, at)
    np.testing.assert_allclose(norm.frozen(at + 2 * x, at), parts, rtol=1e-12, atol=1e-12)


def test_the_frozen_factor_of_derf_is_as_precise_near_zero(x64):
    """The factor is a difference quotient, whose digits cancel near 0. Reference: the series of erf's derivatives there."""
    norm = filled("derf")
    a, s = float(norm.alpha[...]), float(norm.shift[...])
    at = np.concatenate([-np.logspace(-12, -3, 40), [0.0], np.logspace(-12, -3, 40)])[:, None] * np.ones(D)
    h = a * at
    series = 1 - h * s + h**2 * (2 * s**2 - 1) / 3 + h**3 * (3 * s - 2 * s**3) / 6
    expected = a * 2 / np.sqrt(np.pi) * np.exp(-(s**2)) * series * np.asarray(norm.gain[...])
    np.testing.assert_allclose(norm.frozen(jnp.ones(at.shape), jnp.asarray(at)), expected, rtol=1e-9)


def filled(kind: str, epsilon: float = 1e-5) -> norms.Norm:
    """A norm of D numbers in float64 whose parameters are not their initial values."""
    norm = norms.Norm(norms.NormSpec(kind, bias=True, epsilon=epsilon), "D", (D,), "float64")
    values = {"gain": jnp.linspace(0.5, 2, D), "bias": jnp.linspace(-1, 1, D), "alpha": 0.7, "shift": 0.3}
    for name, value in values.items():
        if getattr(norm, name) is not None:
            getattr(norm, name)[...] = jnp.asarray(value)
    return norm
