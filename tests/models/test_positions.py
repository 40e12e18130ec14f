"""Compares positions with NumPy and with their papers: RoPE and its frequency scalings, ALiBi, T5's buckets."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import change, model, random_params, tokens_for
from tests.reference import attention as reference
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models.mixers.softmax.logit_bias import alibi_slopes, t5_bucket
from xfresearch.models.mixers.softmax.options import RopeConfig
from xfresearch.models.mixers.softmax.rope import rope_frequencies, rotate
from xfresearch.models.model_config import longest_sequence
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError

LLAMA = RopeConfig(theta=500_000.0, scaling="llama3")
YARN = RopeConfig(scaling="yarn", factor=4.0, high_frequency=32.0)


def values(*shape, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(theta=500_000.0),
        RopeConfig(fraction=0.5),
        RopeConfig(scaling="linear", factor=3.0),
        replace(LLAMA, original_length=64),
        replace(LLAMA, original_length=64, low_frequency=0.5, high_frequency=9.0, factor=32.0),
        replace(YARN, original_length=64),
        replace(YARN, original_length=2048, high_frequency=4.0, attention_factor=1.3, fraction=0.5),
        replace(YARN, original_length=2, theta=100.0),  # both ends of the ramp are dimension 0
    ],
    ids=str,
)
def test_rotation_equals_the_reference(rope, dtype, x64):
    x_BLHK = values(2, 9, 3, 8, dtype=dtype)
    at = np.tile([[0, 1, 2, 3, 0, 1, 2, 40, 63]], (2, 1))
    result = rotate(x_BLHK, jnp.asarray(at), rope)
    assert result.dtype == dtype
    for b, h in np.ndindex(2, 3):
        expected = reference.rope(np.asarray(x_BLHK[b, :, h], np.float64), at[b], rope)
        assert relative_error(result[b, :, h], expected) < TOLERANCE[dtype]


def test_dot_products_depend_only_on_distances(x64):
    q, k = values(1, 6, 1, 8), values(1, 6, 1, 8, seed=1)
    dots = [
        jnp.einsum("blhk,bshk->ls", *(rotate(x, jnp.arange(6)[None] + shift, RopeConfig(theta=100.0)) for x in (q, k)))
        for shift in (0, 17)
    ]
    assert relative_error(dots[1], dots[0]) < TOLERANCE["float64"]


def test_angles_are_float32_in_a_bfloat16_model():
    """At position 1000, bfloat16 numbers are 8 apart: an angle in bfloat16 would be wrong by radians."""
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    result = rotate(x, jnp.array([[1001]]), RopeConfig())
    expected = reference.rope(np.ones((1, 8)), [1001], RopeConfig())
    assert relative_error(result[0, :, 0], expected) < TOLERANCE["bfloat16"]


def test_llama3_keeps_high_frequencies_and_scales_low_ones():
    plain, result = rope_frequencies(RopeConfig(theta=500_000.0), 128), rope_frequencies(LLAMA, 128)
    turns = LLAMA.original_length * plain / (2 * math.pi)
    assert np.array_equal(result[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(result[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and np.all((result < plain)[between] & (result > plain / 8)[between])


def test_yarn_keeps_high_frequencies_scales_low_ones_and_has_a_linear_ramp():
    plain, result = rope_frequencies(RopeConfig(), 128), rope_frequencies(YARN, 128)
    kept = (result / plain - 1 / 4) / (1 - 1 / 4)
    turns = YARN.original_length * plain / (2 * math.pi)
    np.testing.assert_allclose(kept[turns > 40], 1)
    np.testing.assert_allclose(kept[turns < 0.9], 0, atol=1e-12)
    between = (kept > 1e-9) & (kept < 1 - 1e-9)
    assert between.sum() > 10
    np.testing.assert_allclose(np.diff(kept[between]), np.diff(kept[between])[0], rtol=1e-6)


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))  # sec. 3: 1/2, 1/4, ... 1/2^8 for 8 heads
    np.testing.assert_allclose(alibi_slopes(16)[:3], [2**-0.5, 2**-1, 2**-1.5])
    np.testing.assert_allclose(alibi_slopes(12), [reference.alibi(h, 12) for h in range(12)])


@pytest.mark.parametrize("buckets, farthest", [(32, 128), (8, 20), (6, 5)])
def test_t5_buckets_equal_the_reference(buckets, farthest):
    at = np.arange(-3, 300)
    actual = np.asarray(t5_bucket(jnp.asarray(at), buckets, farthest))
    assert actual.tolist() == [reference.t5_bucket(d, buckets, farthest) for d in at]
    assert actual.max() == buckets - 1 and np.all(np.diff(actual) >= 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": "merged", "position": "rope"}, "another value with query='merged'"),
        ({"query": "merged", "qk_norm": "rms"}, "'none', its default: it is read only with query other than 'merged'"),
        ({"position": "rope", "rope.fraction": 0.4}, "an even number"),
        ({"position": "rope", "rope.high_frequency": 0.5}, "above rope.low_frequency=1.0"),
        ({"position": "rope", "rope.scaling": "yarn", "rope.low_frequency": 0.0}, "above 0 with rope.scaling='yarn'"),
        ({"position": "rope", "rope.scaling": "yarn", "rope.theta": 1.0}, "above 1 with rope.scaling='yarn'"),
        ({"position": "rope", "rope.attention_factor": 1.2}, "0.0, its default: it is read only with scaling='yarn'"),
        ({"position": "t5", "t5_distance": 16}, "above t5_buckets / 2 = 16"),
    ],
)
def test_invalid_options_of_positions_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        model({f"blocks.main.attention.{name}": value for name, value in changes.items()})


def test_a_sequence_longer_than_the_relative_key_is_an_error():
    keys = ["--config.model.blocks.main.attention.position=relative_key", "--config.model.max_length=16"]
    run = ["--config", "configs/llama.py:tiny", *keys]
    with pytest.raises(UserError, match="sequence_length=64.* at most model.max_length=16"):
        parse(run)
    parse([*run, "--config.model.blocks.main.attention.window=16"])  # keys further back are masked


def test_an_offset_shifts_the_rows_and_keeps_the_maximum_length():
    """OPT's table has 2 more rows than positions, and position 0 reads row 2."""
    config = model({"position": "learned", "position_offset": 2, "max_length": 8})
    assert longest_sequence(config) == 8
    plain = replace(config, position_offset=0)
    params = random_params(config)
    tokens_BL = tokens_for(config)
    moved = params | {"position": {"table": params["position"]["table"][2:]}}
    assert moved["position"]["table"].shape == (8, config.width)
    actual, expected = forward(config, params, tokens_BL)[0], forward(plain, moved, tokens_BL)[0]
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(UserError, match="model.position_offset=2.* 0, its default"):
        model({"position_offset": 2})


def test_blocks_with_different_shared_tables_are_an_error():
    base = model({"blocks.main.attention.position": "t5"})
    other = change(base.blocks["main"], "attention.heads", 8)
    with pytest.raises(UserError, match="all layers share the table"):
        model({"blocks": {"main": base.blocks["main"], "other": other}, "pattern": ("main", "other")})
