"""How parameters are drawn and stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL, model
from xfresearch.models import transformer
from xfresearch.models.layers import stacks
from xfresearch.runtime.trees import path_name

# Standard deviation of a standard normal variable that is truncated at three standard deviations.
TRUNCATED = 0.98658


def std_of(changes, *path):
    params = transformer.init(model({"width": 128, "vocab_size": 512} | changes), jax.random.key(0))
    for name in path:
        params = params[name]
    return float(jnp.std(params))


def block(*path):
    return ("blocks", "main", *path)


@pytest.mark.parametrize(
    "path, expected",
    [
        (("embed", "table"), 128**-0.5),
        (block("attention", "query", "kernel"), 128**-0.5),
        (block("feed_forward", "up", "kernel"), 128**-0.5),
        # Outputs to the residual stream are scaled by 1/sqrt(2 * depth), so that its variance does not grow.
        (block("attention", "output", "kernel"), 128**-0.5 / 2),
        (block("feed_forward", "down", "kernel"), 256**-0.5 / 2),
    ],
)
def test_fan_in_sets_the_std_by_the_number_of_inputs(path, expected):
    result = std_of({"init": "fan_in", "blocks.main.feed_forward.hidden": 256}, *path)
    assert result == pytest.approx(expected * TRUNCATED, rel=0.02)


@pytest.mark.covers("init", "init_std")
def test_with_normal_the_std_is_init_std_for_every_fan_in():
    changes = {"init": "normal", "init_std": 0.05}
    for path in [("embed", "table"), block("attention", "query", "kernel"), block("feed_forward", "up", "kernel")]:
        assert std_of(changes, *path) == pytest.approx(0.05 * TRUNCATED, rel=0.03)
    assert std_of(changes, *block("attention", "output", "kernel")) == pytest.approx(0.025 * TRUNCATED, rel=0.03)


@pytest.mark.covers("embedding_std")
@pytest.mark.parametrize("init", ["fan_in", "normal"])
def test_embedding_std_changes_only_the_token_embedding(init):
    changes = {"init": init, "tie_embeddings": False, "position": "learned", "max_length": 512}
    for name in ("embed", "head", "position"):
        without, actual = (std_of(changes | more, name, "table") for more in ({}, {"embedding_std": 1.0}))
        assert actual == pytest.approx(TRUNCATED if name == "embed" else without, rel=0.02), name


def test_outputs_are_not_scaled_if_a_norm_follows():
    result = std_of({"blocks.main.layout": "post_norm", "final_norm": "none"}, *block("attention", "output", "kernel"))
    assert result == pytest.approx(128**-0.5 * TRUNCATED, rel=0.02)


def test_deep_norm_scales_values_outputs_and_feed_forward_but_not_query_and_key():
    """Wang et al. 2022, fig. 2: beta = (8 N)^(-1/4)."""
    beta = (8 * 2) ** -0.25
    deep = {"blocks.main.layout": "deep_norm", "final_norm": "none"}
    for name, scale in [("query", 1), ("key", 1), ("value", beta), ("output", beta)]:
        result = std_of(deep, *block("attention", name, "kernel"))
        assert result == pytest.approx(128**-0.5 * TRUNCATED * scale, rel=0.02), name
    result = std_of(deep, *block("feed_forward", "up", "kernel"))
    assert result == pytest.approx(128**-0.5 * TRUNCATED * beta, rel=0.02)


def test_logits_of_a_merged_matrix_are_as_large_as_those_of_query_and_key():
    """std(W_Q W_K^T) = sqrt(K) / D."""
    result = std_of({"blocks.main.attention.query": "merged"}, *block("attention", "query", "kernel"))
    assert result == pytest.approx(32**0.5 / 128 * TRUNCATED, rel=0.02)


@pytest.mark.covers("blocks.main.norm_alpha", "blocks.main.branch_gain")
def test_initial_values_of_scalars():
    def first(changes, *path):
        params = transformer.init(model(changes), jax.random.key(0))
        for name in path:
            params = params[name]
        return np.unique(params)

    dyt = {"blocks.main.norm": "dyt"}
    assert first(dyt, *block("attention_norm_in", "alpha")) == 0.5  # Zhu et al. 2025, sec. 4
    assert first(dyt | {"blocks.main.norm_alpha": 0.8}, *block("attention_norm_in", "alpha")) == np.float32(0.8)
    derf = {"blocks.main.norm": "derf"}  # 0.5 and 0: the defaults of Chen et al. 2025, in their code
    assert first(derf, *block("attention_norm_in", "alpha")) == 0.5
    assert first(derf | {"blocks.main.norm_alpha": 0.8}, *block("attention_norm_in", "alpha")) == np.float32(0.8)
    assert first(derf, *block("attention_norm_in", "shift")) == 0
    skipless = {"blocks.main.layout": "skipless", "depth": 18}
    assert first(skipless, *block("feed_forward_gain")) == np.float32(0.1)  # He & Hofmann 2023: 0.1 at 18 layers
    assert first(skipless | {"depth": 2}, *block("feed_forward_gain")) == np.float32(0.3)
    assert first(skipless | {"blocks.main.branch_gain": 0.7}, *block("feed_forward_gain")) == np.float32(0.7)
    for gain in ("attention_gain", "feed_forward_skip_gain"):  # 1 in the code of He & Hofmann 2023
        assert first(skipless, *block(gain)) == 1
    assert first({"embedding_scale": "learned"}, "embedding_scale") == np.float32(32**0.5)


def test_experts_are_drawn_like_a_feed_forward_layer():
    changes = {"blocks.main.feed_forward.kind": "moe", "blocks.main.feed_forward.hidden": 64}
    assert std_of(changes, *block("feed_forward", "experts", "up")) == pytest.approx(128**-0.5 * TRUNCATED, rel=0.02)
    assert std_of(changes, *block("feed_forward", "experts", "down")) == pytest.approx(
        64**-0.5 / 2 * TRUNCATED, rel=0.02
    )


def test_memory_slots_are_drawn_as_in_the_paper():
    """Stored keys are N(0, 1/K) and values N(0, 1/M). Attention scales both to N(0, 1)."""
    K, M = 32, 256
    config = model({"width": 128, "blocks.main.attention.memory_slots": M})
    params = transformer.init(config, jax.random.key(0))
    memory = params["blocks"]["main"]["attention"]["memory"]
    assert memory["key"].shape == memory["value"].shape == (2, M, 4, K)
    assert float(memory["key"].std()) == pytest.approx(K**-0.5, rel=0.02)
    assert float(memory["value"].std()) == pytest.approx(M**-0.5, rel=0.02)
    cache = transformer.bind(config, params).init_caches(1, 1)["main"]["attention"]["memory"]
    for used in cache:
        assert float(used.std()) == pytest.approx(1, rel=0.02)


def test_identity_plus_starts_as_the_identity_and_has_both_gains():
    """He & Hofmann 2023, eq. 6 and their code: W_V = a I + b W, a = b = 1, W = 0."""
    config = model({"blocks.main.attention.value": "identity_plus"})
    value = transformer.init(config, jax.random.key(0))["blocks"]["main"]["attention"]["value"]
    assert value["kernel"].shape == (2, 32, 4, 8) and not np.any(value["kernel"])
    for gain in ("identity_gain", "weight_gain"):
        np.testing.assert_array_equal(value[gain], [1, 1])


def test_layers_and_seeds_draw_different_numbers():
    config = model()
    a, b = (transformer.init(config, jax.random.key(seed)) for seed in (0, 1))
    kernel = a["blocks"]["main"]["attention"]["query"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])
    assert not np.allclose(kernel, b["blocks"]["main"]["attention"]["query"]["kernel"])
    assert not np.allclose(kernel, a["blocks"]["main"]["attention"]["key"]["kernel"])


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_a_nested_dict_of_arrays_with_a_letter_for_each_dimension(name):
    config = ALL[name]
    params = transformer.abstract(config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert all(isinstance(key.key, str) for key in path)
        assert leaf.dtype == config.param_dtype
    sizes = {"D": config.width, "V": config.vocab_size, "L": config.max_length + config.position_offset}
    described = jax.tree_util.tree_leaves_with_path(transformer.axes(config))
    repeats = {stack.name: stack.repeats for stack in stacks(config)}
    for (path, leaf), (same, axes) in zip(jax.tree_util.tree_leaves_with_path(params), described, strict=True):
        name = path_name(path)
        assert name == path_name(same) and name.startswith("blocks/") == axes.letters.startswith("N")
        own = sizes | ({"N": repeats[name.split("/")[1]]} if name.startswith("blocks/") else {})
        for letter, size in zip(axes.letters, leaf.shape, strict=True):
            assert own.get(letter, size) == size, name
