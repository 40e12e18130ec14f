"""One update: microbatches equal the whole batch, non-finite updates are skipped, averages follow the weights."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blocks import block as make_block
from tests.tolerances import TOLERANCE, relative_error
from tests.training.rules import gradients
from xfresearch.models.model_config import ModelConfig
from xfresearch.options.run_options import DataConfig, LogConfig, OptimizerConfig, TrainingConfig
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program
from xfresearch.training.step import init_params

MOE = make_block(
    feed_forward={"kind": "moe", "hidden": 16, "moe": {"experts": 4, "z_loss": 0.1, "balance_loss": 0.5}}
)
MEMORY = make_block("all_attention", attention={"memory_slots": 4})
DENSE = make_block()


def make_config(block=DENSE, layers="scan", **training) -> Config:
    final = "none" if block is MEMORY else "layer"
    model = ModelConfig(width=16, depth=2, vocab_size=11, final_norm=final, blocks={"main": block})
    data = DataConfig(packing="documents")
    run = Config(
        steps=10,
        batch_size=8,
        sequence_length=8,
        data=data,
        model=model,
        training=TrainingConfig(layers=layers, **training),
    )
    return resolve(replace(run, optimizer=OptimizerConfig(warmup=0, learning_rate=1e-2)))


def make_batch(lengths, seed=0, L=8, V=11) -> dict:
    """A batch in which row i has lengths[i] tokens, then padding."""
    B, rng = len(lengths), np.random.default_rng(seed)
    valid = np.arange(L) < np.asarray(lengths)[:, None]
    return {
        "tokens": jnp.asarray(rng.integers(0, V, (B, L)), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, V, (B, L)), jnp.int32),
        "weights": jnp.asarray(valid, jnp.float32),
        "segments": jnp.asarray(valid, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(L), (B, L)),
    }


@cache
def compiled(config):
    """Parameters and jitted gradient of a config, cached: hypothesis draws many batches for one compilation."""
    params = init_params(config, config.seed)
    return params, jax.jit(lambda p, b: gradients(config, p, b, jax.random.key(0)))


def test_auxiliary_losses_are_averages_over_tokens_whatever_their_weights():
    """A labelled batch has weights above 0 for some tokens only; the router has chosen experts for all of them."""
    batch = make_batch([8, 3, 8, 5, 2, 8, 1, 6])
    few = batch | {"weights": batch["weights"] * (jnp.arange(8) % 4 == 0)}
    config, collected = make_config(MOE), []
    for each in (batch, few):
        params, gradient = compiled(config)
        collected.append(gradient(params, each)[1])
    assert collected[0]["loss"] != collected[1]["loss"]
    for name in ("balance_loss", "router_z_loss"):
        assert collected[0][name] == collected[1][name] > 0


def grads_of(config, batch):
    params, gradient = compiled(config)
    return gradient(params, batch)


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=8, max_size=8), st.sampled_from([2, 8]))
@pytest.mark.parametrize("block", [MOE, pytest.param(MEMORY, marks=pytest.mark.long)], ids=["moe", "memory"])
def test_microbatches_of_unequal_token_counts_add_up_to_the_whole_batch(block, lengths, parts):
    config = make_config(block, z_loss=0.01)
    batch = make_batch(lengths)
    whole, metrics = grads_of(config, batch)
    summed, more = grads_of(replace(config, training=replace(config.training, accumulate=parts)), batch)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, summed, whole))) < TOLERANCE["float32"]
    assert max(jax.tree.leaves(jax.tree.map(relative_error, more, metrics))) < TOLERANCE["float32"]


def test_a_mean_of_microbatch_means_would_differ():
    """The test above can fail: the mean of the microbatches' means has another gradient."""
    config, batch = make_config(MOE, z_loss=0.01), make_batch([8, 1, 8, 1, 8, 1, 8, 1])
    whole, _ = grads_of(config, batch)
    halves = [grads_of(config, jax.tree.map(lambda x, i=i: x[i::2], batch))[0] for i in (0, 1)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, mean, whole))) > 0.05


def run_steps(config, batches):
    program = Program(config)
    state, step = program.init(hyper_of(config)), jax.jit(program.update)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def poisoned(batch):
    return batch | {"weights": batch["weights"].at[0, 0].set(jnp.nan)}


def test_an_update_that_is_not_finite_is_skipped_and_counted():
    """Its gradient is NaN; or it is finite, and the learning rate makes parameters infinite."""
    config, batch = make_config(on_nonfinite="skip", ema=0.5), make_batch([8] * 8)
    program = Program(config)
    update = jax.jit(program.update)
    clean, _ = update(program.init(hyper_of(config)), batch)
    rates = {"learning_rate": jnp.float32(3e38), "weight_decay": jnp.float32(1e4)}
    for before, data in ((clean, poisoned(batch)), (clean | {"hyper": clean["hyper"] | rates}, batch)):
        state, metrics = update(before, data)
        jax.tree.map(
            np.testing.assert_array_equal,
            (state["params"], state["opt"], state["ema"]),
            (clean["params"], clean["opt"], clean["ema"]),
        )
        assert (int(state["skipped"]), int(state["step"]), bool(metrics["finite"])) == (1, 2, False)


def test_without_skip_an_update_that_is_not_finite_is_reported():
    _, metrics = run_steps(make_config(), [poisoned(make_batch([8] * 8))])
    assert not metrics["finite"]


def test_averaged_weights_follow_the_weights():
    config, batch = make_config(ema=0.75), make_batch([8] * 8)
    before = init_params(config, config.seed)
    state, _ = run_steps(config, [batch])
    expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, before, state["params"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state["ema"], expected)


def test_an_update_leaves_spans_within_their_bounds():
    """Spans start at 0, and a large span_loss pushes them below."""
    spans = make_block(attention={"span": "adaptive", "span_ramp": 2, "span_loss": 10.0})
    state, metrics = run_steps(make_config(spans), [make_batch([8] * 8)])
    fraction = state["params"]["blocks"]["main"]["attention"]["span"]["fraction"]
    assert metrics["gradient_norm"] > 0 and fraction.shape == (2, 4)
    assert fraction.min() >= 0


def test_layer_norms_name_every_parameter_and_layer():
    config = replace(make_config(), log=LogConfig(layer_norms=True))
    state, metrics = run_steps(config, [make_batch([8] * 8)])
    norms = metrics["parameter_norms"]["blocks/main/attention/query/kernel"]
    params = init_params(config, config.seed)
    start = params["blocks"]["main"]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(norms, [np.linalg.norm(start[0]), np.linalg.norm(start[1])], rtol=1e-5)
    assert metrics["gradient_norms"].keys() == metrics["update_norms"].keys() == metrics["parameter_norms"].keys()


LONG_CASES = (("scan", "dots"), ("unroll", "full"), ("unroll", "dots"))


@pytest.mark.parametrize(
    "layers, remat",
    [("scan", "full"), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
)
def test_rematerialisation_and_unrolling_change_no_gradient(remat, layers):
    batch = make_batch([8] * 8)
    plain, _ = grads_of(make_config(MOE, layers="scan"), batch)
    other, _ = grads_of(make_config(MOE, layers=layers, remat=remat), batch)
    errors = jax.tree.leaves(jax.tree.map(relative_error, other, plain))
    assert max(errors) < TOLERANCE["float32"]
