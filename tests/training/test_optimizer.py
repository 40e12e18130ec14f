"""Schedules and update rules."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xfresearch.config import OptimizerConfig
from xfresearch.training.optimizer import SCALINGS, make_optimizer, make_schedule

CONFIG = OptimizerConfig(learning_rate=1.0, warmup=10, final_fraction=0.1, decay_fraction=0.2)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 60: 1.0, 109: 1.0}),
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1}),
        ("linear", {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1}),
        ("wsd", {0: 0.1, 9: 1.0, 60: 1.0, 88: 1.0, 99: 0.55, 110: 0.1}),
    ],
)
def test_schedule(schedule, expected):
    rate = make_schedule(replace(CONFIG, schedule=schedule), 110)
    for step, value in expected.items():
        np.testing.assert_allclose(rate(step), value, rtol=1e-6)


def _params():
    kernel = jax.random.normal(jax.random.key(0), (2, 8, 2, 4))
    return {"embed": {"table": jnp.ones((16, 8))}, "blocks": {"main": {"attention": {"query": {"kernel": kernel}}}}}


@pytest.mark.parametrize("kind", sorted(SCALINGS))
def test_every_rule_descends(kind):
    config = OptimizerConfig(kind=kind, learning_rate=0.05, warmup=0, schedule="constant", weight_decay=0.0)
    optimizer, params = make_optimizer(config, 100), _params()
    loss = lambda p: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(p))  # noqa: E731
    state, first = optimizer.init(params), loss(params)

    @jax.jit
    def update(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for _ in range(30):
        params, state = update(params, state)
    assert loss(params) < 0.9 * first


@pytest.mark.parametrize("kind", sorted(SCALINGS))
def test_weight_decay_acts_on_matrices_alone(kind):
    config = OptimizerConfig(kind=kind, learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.1)
    params, optimizer = _params(), make_optimizer(config, 100)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    kernel = params["blocks"]["main"]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(updates["blocks"]["main"]["attention"]["query"]["kernel"], -0.1 * kernel, rtol=1e-6)
    np.testing.assert_array_equal(updates["embed"]["table"], 0)


def test_muon_orthogonalises_each_layer_and_leaves_tables_to_adam():
    config = OptimizerConfig(kind="muon", learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.0, clip=0.0)
    params, optimizer = _params(), make_optimizer(config, 100)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    kernel = np.asarray(updates["blocks"]["main"]["attention"]["query"]["kernel"]).reshape(2, 8, 8)
    for layer in kernel:
        values = np.linalg.svd(layer, compute_uv=False)
        assert values.max() / values.min() < 3, "five Newton-Schulz steps bring singular values close together"
    assert np.linalg.cond(np.asarray(params["blocks"]["main"]["attention"]["query"]["kernel"]).reshape(2, 8, 8)[0]) > 3
    table = np.asarray(updates["embed"]["table"])
    np.testing.assert_allclose(table, table[0, 0])


def test_clipping_bounds_the_global_norm():
    config = OptimizerConfig(
        kind="sgd", beta1=0.0, learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.0, clip=0.5
    )
    params, optimizer = _params(), make_optimizer(config, 10)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    norm = np.sqrt(sum(np.square(u).sum() for u in jax.tree.leaves(updates)))
    np.testing.assert_allclose(norm, 0.5, rtol=1e-5)
