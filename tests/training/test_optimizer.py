"""Learning-rate schedules and update rules, against their equations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.training.rules import rule_of
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError
from xfresearch.sharding.letters import Axes
from xfresearch.training.hyperparameters import hyper_of, learning_rate
from xfresearch.training.optimizer import SCALINGS

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
    hyper = hyper_of(Config(optimizer=CONFIG, steps=110))
    for step, value in expected.items():
        np.testing.assert_allclose(learning_rate(schedule, hyper, step), value, rtol=1e-6)


OPTAX = {
    "constant": lambda steps, warmup: optax.constant_schedule(0.3),
    "cosine": lambda steps, warmup: optax.cosine_decay_schedule(0.3, max(steps - warmup, 1), 0.2),
    "linear": lambda steps, warmup: optax.linear_schedule(0.3, 0.06, max(steps - warmup, 1)),
}


@pytest.mark.parametrize("steps, warmup", [(50, 10), (50, 0), (50, 1), (10, 20)])
@pytest.mark.parametrize("schedule", OPTAX)
def test_schedules_are_those_of_optax(schedule, steps, warmup):
    config = OptimizerConfig(learning_rate=0.3, warmup=warmup, final_fraction=0.2)
    hyper, at = hyper_of(Config(optimizer=config, steps=steps)), np.arange(70)
    rising = optax.linear_schedule(0.3 / max(warmup, 1), 0.3, max(warmup - 1, 1))
    expected = optax.join_schedules([rising, OPTAX[schedule](steps, warmup)], [warmup])
    result = jax.vmap(lambda step: learning_rate(schedule, hyper, step))(at)
    np.testing.assert_allclose(result, [expected(step) for step in at], rtol=1e-5)


@pytest.mark.parametrize("fraction, begins", [(0.5, 55), (0.95, 10), (1.0, 10)])
def test_wsd_reaches_the_final_rate_although_the_warm_up_leaves_less_than_its_decay(fraction, begins):
    """110 updates, of which the first 10 are the warm-up. In NumPy: linear from the peak at `begins` to 0.1 at the end."""
    hyper, at = hyper_of(Config(optimizer=replace(CONFIG, decay_fraction=fraction), steps=110)), np.arange(10, 111)
    expected = np.interp(at, [begins, 110], [1.0, 0.1])
    result = jax.vmap(lambda step: learning_rate("wsd", hyper, step))(at)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_in_float64_the_rate_is_exact(x64):
    hyper = hyper_of(Config(optimizer=CONFIG, steps=110))
    expected = 0.1 + 0.9 * (1 + np.cos(np.pi * 37 / 100)) / 2
    np.testing.assert_allclose(learning_rate("cosine", hyper, jnp.int32(47)), expected, rtol=1e-15)


AXES = {
    "embed": {"table": Axes("VD")},
    "blocks": {"main": {"attention": {"query": {"kernel": Axes("NDHK", "D", "HK")}}}},
}


def _params():
    kernel = jax.random.normal(jax.random.key(0), (2, 8, 2, 4))
    return {"embed": {"table": jnp.ones((16, 8))}, "blocks": {"main": {"attention": {"query": {"kernel": kernel}}}}}


@pytest.mark.parametrize("kind", sorted(SCALINGS))
def test_every_update_rule_reduces_the_loss(kind):
    config = OptimizerConfig(kind=kind, learning_rate=0.05, warmup=0, schedule="constant", weight_decay=0.0)
    optimizer, params = rule_of(config, 100, AXES), _params()
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
    params, optimizer = _params(), rule_of(config, 100, AXES)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    kernel = params["blocks"]["main"]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(updates["blocks"]["main"]["attention"]["query"]["kernel"], -0.1 * kernel, rtol=1e-6)
    np.testing.assert_array_equal(updates["embed"]["table"], 0)


def test_adafactor_clips_each_layer_of_a_stack():
    """A gradient that rises a thousandfold in one layer leaves the steps of the other one as they are."""
    config = OptimizerConfig(kind="adafactor", learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.0, clip=0.0)
    params, optimizer = _params(), rule_of(config, 100, AXES)
    _, state = optimizer.update(params, optimizer.init(params), params)
    larger = jax.tree.map(lambda g: g, params)
    larger["blocks"] = jax.tree.map(lambda g: g.at[0].multiply(1000), params["blocks"])
    steps = [optimizer.update(grads, state, params)[0]["blocks"] for grads in (params, larger)]
    for before, after in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_array_equal(after[1], before[1])
        assert np.sqrt(np.square(after[0]).mean()) == pytest.approx(1, rel=1e-5)


def test_muon_orthogonalises_each_layer_and_adam_updates_tables():
    config = OptimizerConfig(kind="muon", learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.0, clip=0.0)
    params, optimizer = _params(), rule_of(config, 100, AXES)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    kernel = np.asarray(updates["blocks"]["main"]["attention"]["query"]["kernel"]).reshape(2, 8, 8)
    for layer in kernel:
        values = np.linalg.svd(layer, compute_uv=False)
        assert values.max() / values.min() < 3, "five Newton-Schulz steps bring singular values close together"
    assert np.linalg.cond(np.asarray(params["blocks"]["main"]["attention"]["query"]["kernel"]).reshape(2, 8, 8)[0]) > 3
    table = np.asarray(updates["embed"]["table"])
    nesterov = 0.9 * 0.1 / (1 - 0.9**2) + 1  # Dozat 2016, alg. 8, of the first update
    np.testing.assert_allclose(table, -nesterov * np.sign(params["embed"]["table"]), rtol=1e-5)


def test_clipping_bounds_the_global_norm():
    config = OptimizerConfig(
        kind="sgd", beta1=0.0, learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.0, clip=0.5
    )
    params, optimizer = _params(), rule_of(config, 10, AXES)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    norm = np.sqrt(sum(np.square(u).sum() for u in jax.tree.leaves(updates)))
    np.testing.assert_allclose(norm, 0.5, rtol=1e-5)


def _adamw(g, state, t):
    """Kingma & Ba 2015, alg. 1."""
    m, v = 0.8 * state[0] + 0.2 * g, 0.9 * state[1] + 0.1 * g**2
    return m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-2), (m, v)


def _lion(g, state, t):
    """Chen et al. 2023, alg. 2."""
    return np.sign(0.8 * state[0] + 0.2 * g), (0.9 * state[0] + 0.1 * g,)


def _sgd(g, state, t):
    m = 0.8 * state[0] + g
    return m, (m,)


@pytest.mark.parametrize("rule", [_adamw, _lion, _sgd])
def test_update_rules_against_their_equations(rule):
    """p -= rate (step + decay p), with weight decay as in Loshchilov & Hutter 2019, alg. 2, for matrices only."""
    given = {"kind": rule.__name__[1:], "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-2, "clip": 0.0, "weight_decay": 0.3}
    config = OptimizerConfig(**given, learning_rate=0.1, warmup=2, schedule="constant")
    params, optimizer, random = _params(), rule_of(config, 100, AXES), np.random.default_rng(0)
    state, leaves = optimizer.init(params), [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    states = [(0.0, 0.0)] * len(leaves)
    for t in range(1, 5):
        gradients = [random.standard_normal(leaf.shape) for leaf in leaves]
        for i, g in enumerate(gradients):
            step, states[i] = rule(g, states[i], t)
            decay = 0.3 * (leaves[i].ndim == 4)  # the kernel decays, the table does not
            leaves[i] = leaves[i] - 0.1 * min(1, t / 2) * (step + decay * leaves[i])
        updates, state = optimizer.update(jax.tree.unflatten(jax.tree.structure(params), gradients), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for actual, expected in zip(jax.tree.leaves(params), leaves, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


ADAGRAD = OptimizerConfig(
    kind="adagrad", learning_rate=0.5, warmup=2, schedule="constant", weight_decay=0.0, epsilon=1e-3, clip=1.5
)


def _tensors(tree, layers: int = 2):
    """{name: float64 array} with one array per layer of a stack, as in PyTorch."""
    kernel = np.asarray(tree["blocks"]["main"]["attention"]["query"]["kernel"], np.float64)
    return {"table": np.asarray(tree["embed"]["table"], np.float64)} | {i: kernel[i] for i in range(layers)}


@pytest.mark.parametrize("clip_by", ["global", "tensor"])
def test_adagrad_against_the_equations(clip_by):
    """sum += g^2, p -= rate g / (sqrt(sum) + epsilon), rate = learning_rate min(1, t / warmup).

    'tensor' (Sukhbaatar et al. 2019, their code): rate is multiplied by min(1, clip / |g|), where |g| is the norm of
    one tensor, and sum uses the unclipped g. 'global': g is first multiplied by min(1, clip / |g|), where |g| is the
    norm over all tensors.
    """
    config = replace(ADAGRAD, clip_by=clip_by)
    scale = {"table": 0.05, 0: 1.0, 1: 0.1}  # only the gradient of layer 0 is above the clip
    params, optimizer, random = _params(), rule_of(config, 100, AXES), np.random.default_rng(0)
    state, expected, sums = optimizer.init(params), _tensors(params), dict.fromkeys(scale, 0.0)
    for step in range(1, 5):
        g = {name: scale[name] * random.standard_normal(p.shape) for name, p in expected.items()}
        norms = {name: np.sqrt((x**2).sum()) for name, x in g.items()}
        assert [name for name, norm in norms.items() if norm > config.clip] == [0]
        total = np.sqrt(sum(norm**2 for norm in norms.values()))
        for name, p in expected.items():
            rate = 0.5 * min(1, step / 2)
            clipped = g[name] * min(1, 1.5 / total) if clip_by == "global" else g[name]
            sums[name] = sums[name] + clipped**2
            if clip_by == "tensor":
                rate *= min(1, 1.5 / norms[name])
            expected[name] = p - rate * clipped / (np.sqrt(sums[name]) + 1e-3)
        kernel = {"blocks": {"main": {"attention": {"query": {"kernel": jnp.asarray(np.stack([g[0], g[1]]))}}}}}
        updates, state = optimizer.update({"embed": {"table": jnp.asarray(g["table"])}} | kernel, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for name, result in _tensors(params).items():
        np.testing.assert_allclose(result, expected[name], rtol=2e-5, atol=2e-6)


def test_adagrad_does_not_move_parameters_without_a_gradient_even_if_epsilon_is_0():
    params, optimizer = _params(), rule_of(replace(ADAGRAD, epsilon=0.0, clip_by="tensor"), 10, AXES)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    "changes, key, allowed",
    [
        ({"kind": "adamw"}, "clip_by='tensor'", "'global' unless optimizer.kind='adagrad'"),
        ({"clip": 0.0}, "clip=0.0", "above 0 with clip_by='tensor'"),
    ],
)
def test_clipping_by_tensor_needs_adagrad_and_a_clip(changes, key, allowed):
    with pytest.raises(UserError, match=f"config.optimizer.{key} is not allowed: it must be {allowed}"):
        resolve(Config(optimizer=replace(ADAGRAD, clip_by="tensor", **changes)))
