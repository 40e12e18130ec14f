"""Controls of comparisons: a feed-forward layer as memory, slots alone, W_O without a skip or norm after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.blocks import block
from tests.contracts.passes import capture, forward
from tests.contracts.variants import change, in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import transformer
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.memories import memory
from xfresearch.run_config.closed_form import costs

B = "blocks.main."
A, F = B + "attention.", B + "feed_forward."
WIDE = {"memory_slots": 32, "memory_activation": "relu"}


def logits(config, params):
    return forward(config, params, tokens_for(config))[0]


def main_block(params) -> dict:
    return params["blocks"]["main"]


def as_memory(feed_forward: dict) -> dict:
    """The parameters of a feed-forward layer as slots of the model's width."""
    up, down = feed_forward["up"], feed_forward["down"]
    return {"key": up["kernel"].swapaxes(-1, -2), "bias": up["bias"], "value": down["kernel"]}


def attention_only(**attention) -> BlockConfig:
    return block("attention_only", attention=attention)


def test_a_feed_forward_equals_a_layer_of_slots(x64):
    whole = in_float64(model({"depth": 1, F + "kind": "relu", F + "bias": True}))
    blocks = {"tokens": attention_only(heads=4), "memory": attention_only(kind="slots", bias=("output",), **WIDE)}
    apart = in_float64(model({"depth": 2, "blocks": blocks, "pattern": ("tokens", "memory")}))
    params = random_params(whole)
    block = main_block(params)
    feed_forward = block["feed_forward"]
    layers = {
        "tokens": {"attention": block["attention"], "attention_norm_in": block["attention_norm_in"]},
        "memory": {
            "attention": {"memory": as_memory(feed_forward), "output": {"bias": feed_forward["down"]["bias"]}},
            "attention_norm_in": block["feed_forward_norm_in"],
        },
    }
    restated = params | {"blocks": layers}
    assert jax.tree.structure(restated) == jax.tree.structure(transformer.abstract(apart))
    assert relative_error(logits(apart, restated), logits(whole, params)) < TOLERANCE["float64"]
    assert costs(apart).parameters == costs(whole).parameters
    assert costs(apart).flops_per_token == costs(whole).flops_per_token


def test_a_parallel_feed_forward_equals_slots_next_to_the_heads(x64):
    parallel = in_float64(model({B + "layout": "parallel", F + "kind": "relu", F + "bias": True}))
    next_to_heads = in_float64(model({"blocks": {"main": attention_only(heads=4, bias=("output",), **WIDE)}}))
    params = random_params(parallel)
    block = dict(main_block(params))
    feed_forward = block.pop("feed_forward")
    attention = dict(block["attention"])
    attention["memory"] = as_memory(feed_forward)
    attention["output"] = attention["output"] | {"bias": feed_forward["down"]["bias"]}
    restated = params | {"blocks": {"main": block | {"attention": attention}}}
    assert jax.tree.structure(restated) == jax.tree.structure(transformer.abstract(next_to_heads))
    assert relative_error(logits(next_to_heads, restated), logits(parallel, params)) < TOLERANCE["float64"]


def test_slots_alone_equal_attention_that_sees_no_token(x64):
    """Without sees_itself, the first token sees only the slots."""
    changes = {B + "layout": "attention_only", A + "memory_slots": 5, A + "kv_heads": 2, "depth": 1}
    blind = in_float64(model(changes | {A + "sees_itself": False}))
    alone = in_float64(model(changes | {A + "kind": "slots"}))
    params = random_params(blind)
    attention = {name: p for name, p in main_block(params)["attention"].items() if name not in ("key", "value")}
    slots = params | {"blocks": {"main": main_block(params) | {"attention": attention}}}
    assert jax.tree.structure(slots) == jax.tree.structure(transformer.abstract(alone))
    actual, expected = logits(alone, slots), logits(blind, params)
    assert relative_error(actual[:, 0], expected[:, 0]) < TOLERANCE["float64"]
    assert relative_error(actual[:, 1:], expected[:, 1:]) > 0.01


def test_w_o_can_be_multiplied_into_w_1_if_nothing_is_between_them(x64):
    """The layout no_residual_between computes the same function as fused_output, with separate W_O and W_1."""
    apart, fused = (in_float64(model({B + "layout": name})) for name in ("no_residual_between", "fused_output"))
    params = random_params(apart)
    block = dict(main_block(params))
    attention = dict(block["attention"])
    w_o = attention.pop("output")["kernel"]
    up = block["feed_forward"]["up"]["kernel"]
    product = jnp.einsum("nhkd,ndf->nhkf", w_o, up).reshape(2, 32, 32)
    block |= {"attention": attention, "feed_forward": block["feed_forward"] | {"up": {"kernel": product}}}
    folded = params | {"blocks": {"main": block}}
    assert jax.tree.structure(folded) == jax.tree.structure(transformer.abstract(fused))
    assert relative_error(logits(fused, folded), logits(apart, params)) < TOLERANCE["float64"]


def test_without_a_skip_the_output_contains_no_copy_of_the_input(x64):
    config = in_float64(model({B + "layout": "no_skip", "depth": 1}))
    params = random_params(config)
    main_block(params)["feed_forward"]["down"]["kernel"] *= 0
    (residual_BLD,) = capture(config, params, tokens_for(config), ["blocks.0.feed_forward.residual"])
    assert not np.any(residual_BLD)


@pytest.mark.parametrize("changes", [{"kind": "slots"}, {}])
def test_slots_of_the_models_width_have_keys_values_and_coefficients(changes, x64):
    config = in_float64(model({A + name: value for name, value in (WIDE | changes).items()}))
    params = random_params(config)
    result = memory(config, params, 1, "attention")
    names = ("attention.in", "attention.coefficients", "attention.out")
    x_BLD, m_BLM, y_BLD = capture(config, params, tokens_for(config), [f"blocks.1.{name}" for name in names])
    np.testing.assert_array_equal(result.biases, main_block(params)["attention"]["memory"]["bias"][1])
    assert relative_error(m_BLM, jax.nn.relu(x_BLD @ result.keys.T + result.biases)) < TOLERANCE["float64"]
    if changes:
        assert relative_error(y_BLD, m_BLM @ result.values) < TOLERANCE["float64"]


def feed_forward_of(kind: str, width: int, hidden: int, *taps: str) -> list:
    """Values of taps in the first feed-forward layer at initialisation."""
    config = model({"width": width, "depth": 1, F + "kind": kind, F + "hidden": hidden, "vocab_size": 512})
    names = [f"blocks.0.feed_forward.{tap}" for tap in taps]
    return capture(config, transformer.init(config, jax.random.key(0)), tokens_for(config, 2, 32), names)


@pytest.mark.parametrize("hidden", [3072, 8192])
def test_the_norm_of_solu_is_not_dominated_by_epsilon(hidden):
    """The variance of x softmax(x) is 1.3e-6 at 3072 hidden units, where a norm's epsilon is 1e-5."""
    before, after = feed_forward_of("solu", 64, hidden, "hidden", "coefficients")
    assert before.var() < 1e-5
    assert np.asarray(after).std(-1) == pytest.approx(1, rel=1e-3)


def test_the_output_of_a_softmax_feed_forward_has_the_expected_std():
    (out,) = feed_forward_of("softmax", 64, 1024, "out")
    expected = (np.e / 1024) ** 0.5 / 2**0.5  # a mean of values N(0, 1), scaled by 1/sqrt(2 * depth)
    assert out.std() == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("rank", [2, 8, 24])
def test_initial_logits_of_a_merged_matrix_do_not_depend_on_its_rank(rank):
    """As with a query and a key of size 8: 1/sqrt(8) times a sum of 8 products of normal numbers has a std of 1."""
    attention = {A + "head_size": 8, A + "query": "merged", A + "rank": rank}
    config = model({"width": 64, "vocab_size": 512, "depth": 1, **attention})
    names = ["blocks.0.attention.query", "blocks.0.attention.key"]
    q_BLHK, k_BLGK = capture(config, transformer.init(config, jax.random.key(0)), tokens_for(config, 4, 64), names)
    products = jnp.einsum("blhk,bshk->bhls", q_BLHK, k_BLGK) / 8**0.5
    assert float(products.std()) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_a_norm_can_have_another_alpha_in_attention(kind):
    """Zhu et al. 2025: 1 and 0.5 at width 2048. The code of Chen et al. 2025 has an alpha for each of the three places."""
    changes = {B + "norm": kind, "final_norm": kind, B + "norm_alpha": 0.5, B + "norms.attention_in.alpha": 1.0}
    params = transformer.init(model(changes), jax.random.key(0))
    assert np.unique(main_block(params)["attention_norm_in"]["alpha"]) == 1.0
    assert np.unique(main_block(params)["feed_forward_norm_in"]["alpha"]) == 0.5
    assert params["final_norm"]["alpha"] == 0.5
    same = transformer.init(change(model(changes), B + "norms.attention_in.alpha", None), jax.random.key(0))
    assert np.unique(main_block(same)["attention_norm_in"]["alpha"]) == 0.5
