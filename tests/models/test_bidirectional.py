"""Models that are not causal: every position sees all others, and experts may choose tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import in_float64, model, random_params, tokens_for
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error
from tests.variants.moe import expert_choice
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context
from xfresearch.models.counting import count_flops
from xfresearch.models.taps import Patch, Taps
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError

MOE = "blocks.main.feed_forward.moe."
EXPERT_CHOICE = {
    **{"causal": False, "blocks.main.feed_forward.kind": "moe", MOE + "routing": "expert_choice"},
    **{MOE + "capacity": 1.5, MOE + "renormalise": False, MOE + "balance": "none"},
}
SLOTS = 3  # of each of the 8 experts: 1.5 * 2 * 8 / 8


def sees(config, segments_BL=None):
    """[L, L]: whether the logits at a position (row) have a gradient for the embedding at a position (column)."""
    params = random_params(config)
    tokens_BL = tokens_for(config, 1)

    def logits(shift_BLD):
        shifted = {"embed": lambda embedded_BLD: embedded_BLD + shift_BLD}
        return forward(config, params, tokens_BL, replace=shifted, segments_BL=segments_BL)[0][0]

    _, vjp = jax.vjp(logits, jnp.zeros((1, 8, config.width), config.dtype))
    weights_V = np.random.default_rng(0).standard_normal(config.vocab_size)
    gradients = [vjp(jnp.zeros((8, config.vocab_size)).at[t].set(weights_V))[0][0] for t in range(8)]
    return np.abs(gradients).max(-1) > 0


@pytest.mark.covers("causal")
@pytest.mark.parametrize("changes", [{"causal": False}, EXPERT_CHOICE], ids=["dense", "expert_choice"])
def test_every_position_sees_every_other_of_its_document(changes, x64):
    config = in_float64(model(changes | {"depth": 1}))
    assert sees(config).all()
    segments_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 2]], np.int32)
    np.testing.assert_array_equal(sees(config, segments_BL), segments_BL == segments_BL.T)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rope"},
        {"position": "alibi"},
        {"position": "t5", "t5_buckets": 8, "t5_distance": 5},
        {"memory_slots": 3, "kv_heads": 2},
        {"shaping": "shaped"},
    ],
    ids=str,
)
def test_equals_the_reference(changes, x64):
    """contracts/test_reference.py compares a model without positions: configs/brody_majority.py."""
    changes = {f"blocks.main.attention.{name}": value for name, value in changes.items()}
    config = in_float64(model({"causal": False} | changes))
    params = random_params(config)
    tokens_BL = tokens_for(config)
    segments_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1] * 8], np.int32)
    logits_BLV, _ = forward(config, params, tokens_BL, segments_BL=segments_BL)
    numpy_params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for tokens_L, segments_L, logits_LV in zip(tokens_BL, segments_BL, logits_BLV, strict=True):
        expected_LV, _ = reference.model(config, numpy_params, tokens_L, segments=segments_L)
        assert relative_error(logits_LV, expected_LV) < TOLERANCE["float64"]


def test_a_model_is_causal_by_default(x64):
    np.testing.assert_array_equal(sees(in_float64(model({"depth": 1}))), np.tri(8) > 0)


def mixture(**changes):
    config = in_float64(model(EXPERT_CHOICE | {MOE + name: value for name, value in changes.items()}))
    params = random_params(config)
    first = layers.unstack(transformer.bind(config, params).blocks["main"], config.depth)[0].feed_forward
    x_BLD = jnp.asarray(np.random.default_rng(1).standard_normal((2, 8, config.width)))
    return config, first, reference.pick(params["blocks"]["main"], 0)["feed_forward"], x_BLD


@pytest.mark.covers("blocks.main.feed_forward[moe].moe.routing")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_expert_choice_equals_the_reference(scores, x64):
    config, first, p, x_BLD = mixture(scores=scores)
    y_BLD, _, aux = first(x_BLD, Context(positions_BL=None))
    for b in range(2):
        expected = expert_choice(p, np.asarray(x_BLD[b]), config.blocks["main"].feed_forward)
        assert relative_error(y_BLD[b], expected) < TOLERANCE["float64"]
    np.testing.assert_array_equal(aux.statistics["router_load"], np.full((2, 8), SLOTS))
    assert aux.losses.keys() == {"router_z_loss"}


def test_experts_take_no_padding(x64):
    config, first, p, x_BLD = mixture()
    segments_BL = np.array([[1] * 5 + [0] * 3, [1, 1] + [0] * 6], np.int32)
    y_BLD, _, aux = first(x_BLD, Context(positions_BL=None, segments_BL=segments_BL))
    assert (y_BLD[segments_BL == 0] == 0).all() and jnp.isfinite(y_BLD).all()
    np.testing.assert_array_equal(aux.statistics["router_load"], np.repeat([[SLOTS], [2]], 8, 1))
    all_two = expert_choice(p, np.asarray(x_BLD[1, :2]), config.blocks["main"].feed_forward)
    assert (all_two != np.asarray(y_BLD[1, :2])).any()  # without padding, each expert would take ceil(3 * 2 / 8) = 1


def test_gradients_of_expert_choice_equal_finite_differences(x64):
    config, first, p, x_BLD = mixture()
    shift_BLD = jnp.asarray(np.random.default_rng(2).standard_normal(x_BLD.shape))
    values = [first(x_BLD + step * 1e-6 * shift_BLD, Context(positions_BL=None))[0].sum() for step in (1, -1)]
    gradient_BLD = jax.grad(lambda x_BLD: first(x_BLD, Context(positions_BL=None))[0].sum())(x_BLD)
    assert float((gradient_BLD * shift_BLD).sum()) == pytest.approx(float(values[0] - values[1]) / 2e-6, rel=1e-6)


def test_coefficients_of_expert_choice_can_be_recorded_and_replaced(x64):
    _, first, _, x_BLD = mixture()
    taps = Taps(["coefficients"], {"coefficients": [Patch(lambda h: h.at[1, 5].set(0))]})
    y_BLD, without = (first(x_BLD, Context(positions_BL=None, taps=t))[0] for t in (None, taps))
    assert taps.values["coefficients"].shape == (2, 8, SLOTS, 32)
    np.testing.assert_array_equal(without[0], y_BLD[0])
    assert ((without[1] != y_BLD[1]).any(-1)).sum() == SLOTS


def test_costs_of_expert_choice_equal_the_counts():
    config = model(EXPERT_CHOICE | {MOE + "shared": 1})
    params = transformer.abstract(config)
    tokens_BL = np.zeros((2, 8), np.int32)
    counted = count_flops(lambda params: forward(config, params, tokens_BL)[0], params)
    assert counted == 16 * costs(config, 8).flops_per_token
    assert costs(config).parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_training_on_next_tokens_and_decoding_are_errors():
    config = model({"causal": False})
    with pytest.raises(UserError, match=r"config\.model\.causal=False.* True to train on next"):
        resolve(Config(model=config))
    with pytest.raises(UserError, match=r"config\.model\.causal=False.* True to decode"):
        transformer.bind(config, random_params(config)).init_caches(1, 8)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"causal": True}, r"moe\.routing='expert_choice' .* 'token_choice' with model\.causal=True: .* later tokens"),
        ({MOE + "capacity": 0.0}, r"moe\.capacity=0\.0 .* above 0 with routing='expert_choice'"),
        ({MOE + "renormalise": True}, r"moe\.renormalise=True .* False with routing='expert_choice'"),
        ({MOE + "balance": "bias"}, r"moe\.balance='bias' .* 'none' with routing='expert_choice'"),
    ],
)
def test_invalid_options_of_expert_choice_are_errors(changes, words):
    with pytest.raises(UserError, match=words):
        model(EXPERT_CHOICE | changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sees_itself": False}, "True with model.causal=False: it counts past tokens"),
        ({"window": 2}, "0 with model.causal=False"),
        ({"span": "adaptive"}, "'full' with model.causal=False"),
        ({"position": "relative_key"}, "another value with model.causal=False"),
    ],
)
def test_options_that_need_a_causal_model_are_errors(changes, words):
    with pytest.raises(UserError, match=words):
        model({"causal": False} | {f"blocks.main.attention.{name}": value for name, value in changes.items()})
