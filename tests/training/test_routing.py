"""Routing in training: router metrics of an update, and load balancing by a bias."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from tests.blocks import block
from tests.simulated import results_on_devices
from tests.tolerances import TOLERANCE, relative_error
from tests.training.rules import gradients, rule_of
from tests.training.test_step import make_batch, make_config
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.models.feed_forwards.moe import below_mean
from xfresearch.models.model_config import resolve_model
from xfresearch.models.transformer import bind
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.sharding.letters import Axes
from xfresearch.sharding.partition import batch_sharding, state_shardings
from xfresearch.training.hyperparameters import hyper_of, without_hyper
from xfresearch.training.optimizer import SCALINGS
from xfresearch.training.program import Program

ROOT = Path(__file__).parent.parent.parent
NAMES = {"router_load", "router_mass", "router_entropy", "router_margin", "router_drops"}
LENGTHS = [8, 3, 1, 8, 5, 2, 7, 6]


def config_of(accumulate=1, learning_rate=1e-2, **options):
    moe = {"experts": 4, "scores": "sigmoid", "balance": "bias", "bias_speed": 0.02, **options}
    sparse = block(norm_bias=True, feed_forward={"kind": "moe", "hidden": 16, "moe": moe})
    config = make_config(sparse, accumulate=accumulate)
    return replace(config, optimizer=replace(config.optimizer, learning_rate=learning_rate, weight_decay=0.5))


@cache
def program_of(config):
    """The program and its jitted step of a config without its numbers: most tests share one compilation."""
    program = Program(config)
    return jax.jit(program.init), jax.jit(program.update)


def start(config):
    """A state and a jitted step. The router is skewed: the first expert's kernel is added to the router's input."""
    init, step = program_of(without_hyper(config))
    state = init(hyper_of(config))
    block = state["params"]["blocks"]["main"]
    block["feed_forward_norm_in"]["bias"] += block["feed_forward"]["router"]["kernel"][..., 0]
    return state, step


def bias_of(state):
    return np.asarray(state["params"]["blocks"]["main"]["feed_forward"]["router_bias"])


@pytest.mark.covers("blocks.main.feed_forward[moe].moe.bias_speed")
def test_a_skewed_router_becomes_balanced_without_a_loss():
    state, step = start(config_of(learning_rate=0.0))
    batches = [make_batch([8] * 8, seed) for seed in range(4)]
    loads = []
    for i in range(80):
        state, metrics = step(state, batches[i % 4])
        loads.append(np.asarray(metrics["router_load"]["main"]))
        assert "balance_loss" not in metrics
    assert np.max(loads[0], -1).min() > 0.35  # an even share is 0.25
    assert np.mean(loads[-8:], 0).max() < 0.28
    assert bias_of(state)[:, 0].max() < -0.1


@pytest.mark.long
def test_without_the_bias_the_router_stays_skewed():
    state, step = start(config_of(learning_rate=0.0, bias_speed=0.0))
    for i in range(8):
        state, metrics = step(state, make_batch([8] * 8, i % 4))
    assert np.max(metrics["router_load"]["main"], -1).min() > 0.35
    assert not bias_of(state).any()


def test_bias_and_metrics_of_microbatches_equal_those_of_the_whole_batch():
    batch, (state, step) = make_batch(LENGTHS), start(config_of())
    whole, metrics = step(state, batch)
    load_RE = np.asarray(metrics["router_load"]["main"])
    moved = np.float32(0.02) * np.sign(load_RE.mean(-1, keepdims=True) - load_RE)
    np.testing.assert_array_equal(bias_of(whole), moved)
    assert (moved > 0).any() and (moved < 0).any()
    state, step = start(config_of(accumulate=4))
    summed, more = step(state, batch)
    np.testing.assert_array_equal(bias_of(summed), moved)
    assert NAMES < more.keys() == metrics.keys()
    for name in NAMES:
        assert relative_error(more[name]["main"], metrics[name]["main"]) < TOLERANCE["float32"], name


def three_steps(mesh=None):
    """Router bias and load after three updates, on one device or on a mesh."""
    config = config_of()
    (state, step), where = start(config), None
    if mesh is not None:
        where = state_shardings(mesh, state, transformer.axes(config.model))
        state = jax.device_put(state, where)
        step = jax.jit(Program(config, mesh).update, out_shardings=(where, None))
    for seed in range(3):
        batch = make_batch(LENGTHS, seed)
        batch = jax.device_put(batch, batch_sharding(mesh)) if mesh is not None else batch
        state, metrics = step(state, batch)
    return {"bias": bias_of(state).tolist(), "load": metrics["router_load"]["main"].tolist()}


def test_bias_and_load_on_a_mesh_equal_those_on_one_device():
    assert results_on_devices(8, "-m", "tests.training.test_routing", timeout=300) == three_steps()


def test_router_metrics_are_means_of_the_models_statistics():
    config, batch = config_of(capacity=0.5), make_batch(LENGTHS)
    state, step = start(config)
    metrics = step(state, batch)[1]
    out = bind(config.model, state["params"])(batch["tokens"], Context(batch["positions"], batch["segments"]))
    tokens, sums = sum(LENGTHS), {name: x.sum(1) for name, x in out.statistics["main"]["feed_forward"].items()}
    for name in NAMES:
        per = 2 * tokens if name in ("router_load", "router_drops") else tokens
        assert relative_error(metrics[name]["main"], sums[name] / per) < TOLERANCE["float32"], name
    np.testing.assert_allclose(metrics["router_load"]["main"].sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["router_mass"]["main"].sum(-1), 1, rtol=1e-6)
    assert (metrics["router_drops"]["main"] > 0.05).all()


def two_mixtures(**options):
    """A config with two mixtures in each block, with different numbers of experts and `options` of the first one."""
    first, second = (
        {"kind": "moe", "hidden": 16, "moe": {"experts": count, "z_loss": 0.0, "scores": "sigmoid", **more}}
        for count, more in ((4, options), (3, {"balance": "bias", "bias_speed": 0.02}))
    )
    sparse = block("macaron", feed_forward_1=first, feed_forward_2=second)
    config = make_config()
    return replace(config, model=resolve_model(replace(config.model, blocks={"main": sparse}, final_norm="none")))


def test_each_mixture_of_a_block_has_its_own_bias_and_metrics():
    init, step = program_of(without_hyper(config := two_mixtures(balance="bias", bias_speed=0.05)))
    state, metrics = step(init(hyper_of(config)), make_batch(LENGTHS))
    for sublayer, speed, experts in (("feed_forward_1", 0.05, 4), ("feed_forward_2", 0.02, 3)):
        load_RE = np.asarray(metrics["router_load"][f"main/{sublayer}"])
        assert load_RE.shape == (2, experts)
        moved = np.float32(speed) * np.sign(load_RE.mean(-1, keepdims=True) - load_RE)
        np.testing.assert_array_equal(state["params"]["blocks"]["main"][sublayer]["router_bias"], moved)
        assert moved.any()


def test_losses_of_the_mixtures_of_a_block_add_up():
    """The second mixture has a loss of 0 for its logits, under the same name."""
    init, step = program_of(without_hyper(config := two_mixtures(balance="none", z_loss=0.5)))
    assert step(init(hyper_of(config)), make_batch(LENGTHS))[1]["router_z_loss"] > 0


def test_a_dense_model_has_no_router_metrics():
    program = Program(make_config())
    metrics = jax.eval_shape(program.update, program.shapes, make_batch(LENGTHS))[1]
    assert not NAMES & metrics.keys() and "statistics" not in metrics


def test_the_bias_has_no_gradient():
    config = config_of()
    grads = jax.jit(lambda p, b: gradients(config, p, b, jax.random.key(0)))(
        start(config)[0]["params"], make_batch([8] * 8)
    )[0]
    feed_forward = grads["blocks"]["main"]["feed_forward"]
    assert not feed_forward["router_bias"].any() and feed_forward["router"]["kernel"].any()


@pytest.mark.parametrize("kind", SCALINGS)
def test_no_update_rule_moves_or_decays_the_bias(kind):
    feed_forward = {"router": {"kernel": jnp.ones((1, 4, 4))}, "router_bias": jnp.arange(4.0)[None]}
    params = {"blocks": {"main": {"feed_forward": feed_forward}}}
    letters = {"router": {"kernel": Axes("NDE", "D", "E")}, "router_bias": Axes("NE")}
    axes = {"blocks": {"main": {"feed_forward": letters}}}
    optimizer = rule_of(OptimizerConfig(kind=kind, weight_decay=0.5, warmup=0), 10, axes)
    opt = optimizer.init(params)
    for scale in (0.3, -1.0):
        gradient = jax.tree.map(lambda p, scale=scale: scale * (p if p.ndim == 3 else 0 * p), params)
        updates, opt = optimizer.update(gradient, opt, params)
        assert not updates["blocks"]["main"]["feed_forward"]["router_bias"].any()


@example([2_000_000_000, 0, 0, 0])  # times 4 exceeds int32
@example([16_777_217, 16_777_216])  # equal in float32
@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 50) | st.integers(0, 50_000_000), min_size=1, max_size=6))
def test_below_mean_is_exact(load):
    expected = [np.sign(sum(load) - len(load) * count) for count in load]
    np.testing.assert_array_equal(below_mean(jnp.array([load], jnp.int32))[0], expected)


def test_jitter_is_random_in_training():
    batch = make_batch([8] * 8)
    config = config_of(jitter=0.9)
    params, _ = start(config)
    run = jax.jit(lambda key: gradients(config, params["params"], batch, key)[1]["loss"])
    assert run(jax.random.key(0)) != run(jax.random.key(1))


if __name__ == "__main__":
    names = ("data", "fsdp", "expert", "tensor", "context")
    print(json.dumps(three_steps(jax.make_mesh((2, 1, 2, 1, 2), names, axis_types=(AxisType.Auto,) * 5))))
