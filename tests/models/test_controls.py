"""Controls of the questions: the feed-forward restated as memory, slots alone, W_O without a residual or norm behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.blocks import block
from tests.contracts.variants import change, forward, in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import transformer
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.closed_form import costs
from xfresearch.models.memory import memory
from xfresearch.models.taps import Taps

B = "blocks.main."
A, F = B + "attention.", B + "feed_forward."
WIDE = {"memory_slots": 32, "memory_activation": "relu"}


def logits(config, params):
    return forward(config, params, tokens_for(config))[0]


def of(params) -> dict:
    return params["blocks"]["main"]


def as_memory(feed_forward: dict) -> dict:
    """The parameters of a feed-forward as slots of the model's width."""
    up, down = feed_forward["up"], feed_forward["down"]
    return {"key": up["kernel"].swapaxes(-1, -2), "bias": up["bias"], "value": down["kernel"]}


def attention_only(**attention) -> BlockConfig:
    return block("attention_only", attention=attention)


def test_a_feed_forward_is_a_memory_in_a_layer_of_its_own(x64):
    whole = in_float64(model({"depth": 1, F + "kind": "relu", F + "bias": True}))
    blocks = {"tokens": attention_only(heads=4), "memory": attention_only(kind="slots", bias=("output",), **WIDE)}
    apart = in_float64(model({"depth": 2, "blocks": blocks, "pattern": ("tokens", "memory")}))
    params = random_params(whole)
    block = of(params)
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


def test_a_parallel_feed_forward_is_a_memory_beside_the_heads(x64):
    parallel = in_float64(model({B + "layout": "parallel", F + "kind": "relu", F + "bias": True}))
    beside = in_float64(model({"blocks": {"main": attention_only(heads=4, bias=("output",), **WIDE)}}))
    params = random_params(parallel)
    block = dict(of(params))
    feed_forward, attention = block.pop("feed_forward"), dict(block["attention"])
    attention["memory"] = as_memory(feed_forward)
    attention["output"] = attention["output"] | {"bias": feed_forward["down"]["bias"]}
    restated = params | {"blocks": {"main": block | {"attention": attention}}}
    assert jax.tree.structure(restated) == jax.tree.structure(transformer.abstract(beside))
    assert relative_error(logits(beside, restated), logits(parallel, params)) < TOLERANCE["float64"]


def test_slots_alone_are_attention_that_sees_no_token(x64):
    """The first token of a model without sees_itself sees the slots alone."""
    changes = {B + "layout": "attention_only", F + "hidden": 0, A + "memory_slots": 5, A + "kv_heads": 2, "depth": 1}
    blind = in_float64(model(changes | {A + "sees_itself": False}))
    alone = in_float64(model(changes | {A + "kind": "slots"}))
    params = random_params(blind)
    attention = {name: p for name, p in of(params)["attention"].items() if name not in ("key", "value")}
    slots = params | {"blocks": {"main": of(params) | {"attention": attention}}}
    assert jax.tree.structure(slots) == jax.tree.structure(transformer.abstract(alone))
    found, expected = logits(alone, slots), logits(blind, params)
    assert relative_error(found[:, 0], expected[:, 0]) < TOLERANCE["float64"]
    assert relative_error(found[:, 1:], expected[:, 1:]) > 0.01


def test_w_o_folds_into_w_1_where_nothing_stands_between(x64):
    """The control of fused_output computes the same function with W_O and W_1 apart."""
    apart, fused = (in_float64(model({B + "layout": name})) for name in ("no_residual_between", "fused_output"))
    params = random_params(apart)
    block = dict(of(params))
    attention = dict(block["attention"])
    w_o, up = attention.pop("output")["kernel"], block["feed_forward"]["up"]["kernel"]
    product = jnp.einsum("nhkd,ndf->nhkf", w_o, up).reshape(2, 32, 32)
    block |= {"attention": attention, "feed_forward": block["feed_forward"] | {"up": {"kernel": product}}}
    folded = params | {"blocks": {"main": block}}
    assert jax.tree.structure(folded) == jax.tree.structure(transformer.abstract(fused))
    assert relative_error(logits(fused, folded), logits(apart, params)) < TOLERANCE["float64"]


def test_without_a_skip_nothing_of_the_input_is_left(x64):
    config = in_float64(model({B + "layout": "no_skip", "depth": 1}))
    params = random_params(config)
    of(params)["feed_forward"]["down"]["kernel"] *= 0
    taps = Taps(record=["blocks.0.feed_forward.residual"])
    forward(config, params, tokens_for(config), taps=taps)
    assert not np.any(taps.values["blocks.0.feed_forward.residual"])


@pytest.mark.parametrize("changes", [{"kind": "slots"}, {}])
def test_the_memory_of_the_models_width_is_keys_values_and_coefficients(changes, x64):
    config = in_float64(model({A + name: value for name, value in (WIDE | changes).items()}))
    params = random_params(config)
    found, names = memory(config, params, 1, "attention"), ("attention.in", "attention.coefficients", "attention.out")
    taps = Taps(record=[f"blocks.1.{name}" for name in names])
    forward(config, params, tokens_for(config), taps=taps)
    x_BLD, m_BLM, y_BLD = taps.values.values()
    bias = of(params)["attention"]["memory"]["bias"][1]
    assert relative_error(m_BLM, jax.nn.relu(x_BLD @ found.keys.T + bias)) < TOLERANCE["float64"]
    if changes:
        assert relative_error(y_BLD, m_BLM @ found.values) < TOLERANCE["float64"]


def feed_forward_of(kind: str, width: int, hidden: int, *taps: str) -> list:
    """Values inside the first feed-forward at initialisation."""
    config = model({"width": width, "depth": 1, F + "kind": kind, F + "hidden": hidden, "vocab_size": 512})
    found = Taps(record=[f"blocks.0.feed_forward.{tap}" for tap in taps])
    forward(config, transformer.init(config, jax.random.key(0)), tokens_for(config, 2, 32), taps=found)
    return list(found.values.values())


@pytest.mark.parametrize("hidden", [3072, 8192])
def test_solu_is_normed_to_one_and_not_to_its_epsilon(hidden):
    """The variance of x softmax(x) is 1.3e-6 at 3072 hidden units, where a norm's epsilon is 1e-5."""
    before, after = feed_forward_of("solu", 64, hidden, "hidden", "coefficients")
    assert before.var() < 1e-5
    assert np.asarray(after).std(-1) == pytest.approx(1, rel=1e-3)


def test_a_softmax_feed_forward_does_not_start_dead():
    (out,) = feed_forward_of("softmax", 64, 1024, "out")
    expected = (np.e / 1024) ** 0.5 / 2**0.5  # a mean of values N(0, 1), scaled by 1/sqrt(2 * depth)
    assert out.std() == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("rank", [2, 8, 24])
def test_logits_of_a_merged_matrix_start_as_large_as_the_pairs_whatever_its_rank(rank):
    """Head size 8: 1/sqrt(8) sum of 8 products of normal numbers has a standard deviation of 1."""
    config = model({"width": 64, A + "head_size": 8, A + "query": "merged", A + "rank": rank, "vocab_size": 512, "depth": 1})
    taps = Taps(record=["blocks.0.attention.query", "blocks.0.attention.key"])
    forward(config, transformer.init(config, jax.random.key(0)), tokens_for(config, 4, 64), taps=taps)
    q_BLHK, k_BLGK = taps.values.values()
    products = jnp.einsum("blhk,bshk->bhls", q_BLHK, k_BLGK) / 8**0.5
    assert float(products.std()) == pytest.approx(1, rel=0.15)


def test_dyt_has_an_alpha_of_attentions_and_one_of_the_rest():
    """Zhu et al. 2025: 1 and 0.5 at width 2048."""
    changes = {B + "norm": "dyt", "final_norm": "dyt", B + "norm_alpha": 0.5, B + "norm_alpha_attention": 1.0}
    params = transformer.init(model(changes), jax.random.key(0))
    assert np.unique(of(params)["attention_norm_in"]["alpha"]) == 1.0
    assert np.unique(of(params)["feed_forward_norm_in"]["alpha"]) == 0.5
    assert params["final_norm"]["alpha"] == 0.5
    same = transformer.init(change(model(changes), B + "norm_alpha_attention", 0.0), jax.random.key(0))
    assert np.unique(of(same)["attention_norm_in"]["alpha"]) == 0.5
