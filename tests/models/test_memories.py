"""Keys, values and coefficients: the output of a layer is the sum of its values, weighted by the coefficients."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture
from tests.contracts.variants import VARIANTS, change, in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from tests.variants import ACTIVATIONS as REFERENCES
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.memories import memory
from xfresearch.runtime.errors import UserError


def captured(config, params, *names):
    return capture(config, params, tokens_for(config), [f"blocks.1.{name}" for name in names])


@pytest.mark.parametrize("kind, bias", [*((kind, False) for kind in ACTIVATIONS), ("gelu", True), ("swiglu", True)])
def test_the_output_of_a_feed_forward_is_its_values_weighted_by_their_coefficients(kind, bias, x64):
    config = in_float64(model({"blocks.main.feed_forward.kind": kind, "blocks.main.feed_forward.bias": bias}))
    params = random_params(config)
    x_BLD, hidden_BLF, m_BLF, y_BLD = captured(
        config, params, *(f"feed_forward.{name}" for name in ("in", "hidden", "coefficients", "out"))
    )
    result = memory(config, params, 1)
    assert result.keys.shape == result.values.shape == (32, 32)
    assert (result.bias is None) == (result.biases is None) == (not bias)
    b_F, multiplier_b_F, b_D = (0 if b is None else b for b in (result.biases, result.multiplier_biases, result.bias))
    assert relative_error(m_BLF @ result.writes + b_D, y_BLD) < TOLERANCE["float64"]
    np.testing.assert_array_equal(result.writes, result.values)
    expected = REFERENCES[kind].reference(np.asarray(x_BLD @ result.keys.T + b_F))
    if ACTIVATIONS[kind].gated:
        expected *= REFERENCES[kind].multiplier(x_BLD @ result.multipliers.T + multiplier_b_F)
    else:
        assert result.multipliers is None and result.multiplier_biases is None
    assert relative_error(hidden_BLF, expected) < TOLERANCE["float64"]
    assert ACTIVATIONS[kind].norm == (not np.array_equal(hidden_BLF, m_BLF))


@pytest.mark.parametrize("heads", ["each", "shared"])
def test_the_output_of_slots_is_their_values_weighted_by_their_coefficients(heads, x64):
    """The values of tokens are set to zero, so the heads only have the output of the slots."""
    changes = {"memory_slots": 5, "memory_heads": heads, "kv_heads": 2, "bias": ("output",)}
    config = in_float64(model({f"blocks.main.attention.{k}": v for k, v in changes.items()}))
    params = random_params(config)
    params["blocks"]["main"]["attention"]["value"]["kernel"] *= 0
    q_BLHK, k_BLGK, m_BHLM, o_BLHK, y_BLD = captured(
        config, params, *(f"attention.{name}" for name in ("query", "key", "coefficients", "heads", "out"))
    )
    result = memory(config, params, 1, "attention")
    assert result.keys.shape == result.values.shape == (2 if heads == "each" else 1, 5, 8)
    keys, values = (jnp.repeat(x, 4 // x.shape[0], 0) for x in (result.keys, result.values))
    assert relative_error(jnp.einsum("bhlm,hmk->blhk", m_BHLM, values), o_BLHK) < TOLERANCE["float64"]
    assert relative_error(jnp.einsum("bhlm,hmd->bld", m_BHLM, result.writes) + result.bias, y_BLD) < TOLERANCE["float64"]
    scores = jnp.einsum("blhk,hmk->bhlm", q_BLHK, keys)
    ratios = np.asarray(m_BHLM[..., 1:] / m_BHLM[..., :1])
    np.testing.assert_allclose(ratios, np.exp((scores[..., 1:] - scores[..., :1]) / 8**0.5), rtol=1e-9)


def test_slots_of_heads_without_an_output_matrix_write_their_part_of_all_heads(x64):
    changes = {"memory_slots": 5, "output": "identity"}
    config = in_float64(model({f"blocks.main.attention.{k}": v for k, v in changes.items()}))
    params = random_params(config)
    params["blocks"]["main"]["attention"]["value"]["kernel"] *= 0
    m_BHLM, y_BLD = captured(config, params, "attention.coefficients", "attention.raw")
    writes_HMD = memory(config, params, 1, "attention").writes
    assert relative_error(jnp.einsum("bhlm,hmd->bld", m_BHLM, writes_HMD), y_BLD) < TOLERANCE["float64"]


def test_each_expert_is_a_memory():
    config = VARIANTS["feed_forward.kind=moe"]
    params = random_params(config)
    result = memory(config, params, 1)
    assert result.keys.shape == result.values.shape == result.multipliers.shape == (8, 32, 32)
    experts = params["blocks"]["main"]["feed_forward"]["experts"]
    np.testing.assert_array_equal(result.keys[3].T, experts["gate"][1, 3])
    np.testing.assert_array_equal(result.values[3], experts["down"][1, 3])
    config = VARIANTS["feed_forward[moe].moe.shared=2"]
    shared = memory(config, random_params(config), 1, "feed_forward.shared")
    assert shared.keys.shape == shared.values.shape == (64, 32)


def test_layers_of_a_pattern_have_separate_memories():
    config = VARIANTS["pattern-repeated"]
    params = random_params(config)
    assert memory(config, params, 1).keys.shape == (4, 32, 8)  # all-attention: slots replace the feed-forward
    np.testing.assert_array_equal(
        memory(config, params, 2).values, params["blocks"]["dense_2"]["feed_forward"]["down"]["kernel"][0]
    )


@pytest.mark.parametrize(
    "layer, sublayer, message",
    [
        (2, "", "layer 2: this model has layers 0 to 1"),
        (-1, "", "layers 0 to 1"),
        (0, "attention", "'attention' has no memory .*: feed_forward"),
        (0, "attn", "'attn' has no memory"),
    ],
)
def test_errors_of_memory_are_one_line(layer, sublayer, message):
    config = model()
    with pytest.raises(UserError, match=message):
        memory(config, random_params(config), layer, sublayer)


def test_a_coefficient_of_zero_removes_its_value_from_the_output():
    config = change(VARIANTS["base"], "depth", 1)
    params = random_params(config)
    values = memory(config, params, 0).values
    names = ["blocks.0.feed_forward.coefficients", "blocks.0.feed_forward.out"]
    m_BLF, before = capture(config, params, tokens_for(config), names)
    off = {names[0]: lambda m: m.at[..., 3].set(0)}
    removed = before - capture(config, params, tokens_for(config), names[1:], replace=off)[0]
    np.testing.assert_allclose(removed, m_BLF[..., 3:4] * values[3], rtol=1e-3, atol=1e-5)
