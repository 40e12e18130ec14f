"""Compares single parts of the model with NumPy, in float64 and float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import in_float64, model, random_params, tokens_for
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error
from tests.variants import ACTIVATIONS as OF_ACTIVATIONS
from tests.variants import NORMS as OF_NORMS
from xfresearch.models import norms, positions
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.norms import NORMS

DTYPES = ["float64", "float32"]
A = "blocks.main.attention."
F = "blocks.main.feed_forward."
ROPE = {A + "position": "rope"}
T5 = {A + "position": "t5", A + "t5_buckets": 6}
LLAMA3 = ROPE | {A + "rope.scaling": "llama3", A + "rope.original_length": 64}
YARN = ROPE | {A + "rope.scaling": "yarn", A + "rope.original_length": 64}
# {option: changes that set it to a value that no variant has}
NUMERIC = {
    A + "rope.theta": ROPE | {A + "rope.theta": 50.0},
    A + "rope.factor": ROPE | {A + "rope.scaling": "linear", A + "rope.factor": 3.0},
    A + "rope.low_frequency": LLAMA3 | {A + "rope.low_frequency": 0.5},
    A + "rope.high_frequency": LLAMA3 | {A + "rope.high_frequency": 9.0},
    A + "rope.original_length": YARN | {A + "rope.original_length": 16},
    A + "rope.attention_factor": YARN | {A + "rope.attention_factor": 1.3},
    A + "t5_buckets": T5,
    A + "t5_distance": T5 | {A + "t5_distance": 5},
    A + "span_loss": {A + "span": "adaptive", A + "span_loss": 0.7},
    "blocks.main.feed_forward[moe].moe.balance_loss": {F + "kind": "moe", F + "moe.balance_loss": 0.7},
    "blocks.main.feed_forward[moe].moe.z_loss": {F + "kind": "moe", F + "moe.z_loss": 0.3},
}


def values(*shape, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_norms_equal_the_reference(kind, dtype, epsilon, x64):
    x = 3 * values(4, 7, dtype=dtype) + 2
    expected = OF_NORMS[kind].reference({"alpha": 1.0, "shift": 0.0}, wide(x), epsilon)
    assert relative_error(NORMS[kind](x, epsilon), expected) < TOLERANCE[dtype]


def test_layer_norm_subtracts_the_mean_before_it_squares():
    """E[x^2] - E[x]^2 would lose three digits."""
    x = values(4, 64, dtype="float32") + 30
    assert relative_error(norms.layer(x, 1e-5), OF_NORMS["layer"].reference({}, wide(x), 1e-5)) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_equal_the_reference(kind, dtype, x64):
    x = 4 * values(300, dtype=dtype)
    result = ACTIVATIONS[kind].function(x)
    assert result.dtype == dtype
    assert relative_error(result, OF_ACTIVATIONS[kind].reference(wide(x))) < TOLERANCE[dtype]
    assert ACTIVATIONS[kind].gated == OF_ACTIVATIONS[kind].gated
    assert relative_error(ACTIVATIONS[kind].multiplier(x), OF_ACTIVATIONS[kind].multiplier(wide(x))) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_sinusoidal_positions_equal_the_reference(width, x64):
    at = np.array([[0, 1, 2, 500, 3]])
    assert relative_error(positions.sinusoidal(jnp.asarray(at), width)[0], reference.sinusoidal(at[0], width)) < 1e-12


@pytest.mark.parametrize(
    "changes", [pytest.param(changes, marks=pytest.mark.covers(path), id=path) for path, changes in NUMERIC.items()]
)
def test_numeric_options_equal_the_reference(changes, x64):
    config = in_float64(model(changes))
    params = random_params(config)
    tokens_BL = tokens_for(config)
    logits, losses = forward(config, params, tokens_BL)
    for b, tokens in enumerate(tokens_BL):
        expected, expected_losses = reference.model(config, jax.tree.map(np.asarray, params), tokens)
        assert relative_error(logits[b], expected) < TOLERANCE["float64"]
        for name, value in expected_losses.items():
            assert relative_error(losses[name][b], value) < TOLERANCE["float64"]


def test_with_even_routing_the_balance_loss_is_its_weight_per_token_and_layer(x64):
    """Switch, sec. 2.2: with equal probabilities, E sum f P = 1 for every f."""
    config = in_float64(model({"blocks.main.feed_forward.kind": "moe"}))
    params = random_params(config)
    router = params["blocks"]["main"]["feed_forward"]["router"]
    router["kernel"] = jnp.zeros_like(router["kernel"])
    _, losses = forward(config, params, tokens_for(config))
    moe = config.blocks["main"].feed_forward.moe
    assert relative_error(losses["balance_loss"], np.full(2, moe.balance_loss * 2 * 8)) < TOLERANCE["float64"]
    assert (
        relative_error(losses["router_z_loss"], np.full(2, moe.z_loss * 2 * 8 * np.log(8) ** 2)) < TOLERANCE["float64"]
    )


def test_a_moe_of_equal_experts_equals_one_expert(x64):
    """Without a capacity, no token is dropped, whatever the routing."""
    changes = {"blocks.main.feed_forward.kind": "moe", "blocks.main.feed_forward.moe.top_k": 3}
    config = in_float64(model(changes))
    params = random_params(config)
    experts = params["blocks"]["main"]["feed_forward"]["experts"]
    experts |= {name: jnp.broadcast_to(w[:, :1], w.shape) for name, w in experts.items()}
    dense = in_float64(model({"blocks.main.feed_forward.kind": "swiglu"}))
    dense_params = jax.tree.map(lambda leaf: leaf, params)
    dense_params["blocks"]["main"]["feed_forward"] = {name: {"kernel": w[:, 0]} for name, w in experts.items()}
    tokens_BL = tokens_for(config)
    actual, expected = forward(config, params, tokens_BL)[0], forward(dense, dense_params, tokens_BL)[0]
    assert relative_error(actual, expected) < TOLERANCE["float64"]
