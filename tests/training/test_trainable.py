"""config.optimizer.trainable: frozen parameters keep every bit, and have no gradient and no optimizer state."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.training.test_routing import config_of
from tests.training.test_step import grads_of, make_batch, make_config, run_steps
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.planning.formula import estimate_step
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.trees import by_path
from xfresearch.sharding.mesh import AXES
from xfresearch.training import monitoring
from xfresearch.training.optimizer import SCALINGS, trainable
from xfresearch.training.program import Program
from xfresearch.training.step import init_params

PATTERNS = ("*norm*", "blocks/*/query/*")
ONE = dict.fromkeys(AXES, 1)


def training(config, *patterns: str, **optimizer):
    return replace(config, optimizer=replace(config.optimizer, trainable=patterns, **optimizer))


def size(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def is_trained(path: str) -> bool:
    return "norm" in path or "query" in path


def test_frozen_parameters_and_their_averages_keep_every_bit():
    """Also with weight decay, and where a router's bias changes without a gradient."""
    config = training(config_of(), *PATTERNS, weight_decay=0.5)
    config = replace(config, training=replace(config.training, ema=0.9))
    before = by_path(init_params(config, config.seed))
    state, _ = run_steps(config, [make_batch([8] * 8, seed) for seed in range(3)])
    for tree in (state["params"], state["ema"]):
        changed = {path for path, leaf in by_path(tree).items() if not np.array_equal(leaf, before[path])}
        assert changed == {path for path in before if is_trained(path)}
    assert any("router_bias" in path for path in before)


@pytest.mark.parametrize("kind", sorted(SCALINGS))
def test_frozen_parameters_have_no_optimizer_state(kind):
    config = training(make_config(), *PATTERNS, kind=kind)
    state = Program(config).shapes
    params, opt = by_path(state["params"]), by_path(state["opt"])
    held = {path for path in params for name in opt if name.endswith("/" + path)}
    assert held == {path for path in params if is_trained(path)}
    if kind == "adamw":
        assert size(state["opt"]) == 2 * size(trainable(config.optimizer, state["params"])[0]) + 1  # Adam's counter


def test_only_trained_parameters_have_gradients_and_count_in_the_clipped_norm():
    sgd = {"kind": "sgd", "learning_rate": 1.0, "beta1": 0.0, "weight_decay": 0.0, "clip": 1e-3}
    config, batch = make_config(), make_batch([8] * 8)
    config = replace(config, optimizer=OptimizerConfig(warmup=0, schedule="constant", **sgd))
    whole, _ = grads_of(config, batch)
    part, _ = grads_of(training(config, *PATTERNS), batch)
    assert by_path(part).keys() == {path for path in by_path(whole) if is_trained(path)}
    for path, leaf in by_path(part).items():
        np.testing.assert_allclose(leaf, by_path(whole)[path], rtol=1e-5, atol=1e-7)
    config = training(config, *PATTERNS)
    before = init_params(config, config.seed)
    state, metrics = run_steps(config, [batch])
    squares = [np.square(a - b).sum() for a, b in zip(*map(jax.tree.leaves, (state["params"], before)), strict=True)]
    np.testing.assert_allclose(np.sqrt(sum(squares)), 1e-3, rtol=1e-3)
    np.testing.assert_allclose(metrics["gradient_norm"], np.sqrt(sum(np.square(g).sum() for g in by_path(part).values())))


def test_a_pattern_that_matches_no_parameter_is_refused():
    words = r"config.optimizer.trainable=\('\*norm\*', 'haed/\*'\).*'haed/\*' matches none of .*"
    with pytest.raises(UserError, match=words):
        Program(training(make_config(), "*norm*", "haed/*"))


def test_a_plan_counts_the_state_and_gradients_of_trained_parameters_alone():
    two = ONE | {"data": 2}  # on one device, gradients are a part of what the traced step holds
    all_of_it, part = (estimate_step(config, two) for config in (make_config(), training(make_config(), *PATTERNS)))
    trained = 4 * size(trainable(training(make_config(), *PATTERNS).optimizer, part.state["params"])[0])
    assert part.memory["parameters"] == all_of_it.memory["parameters"] == all_of_it.memory["gradients"]
    assert part.memory["gradients"] == trained
    assert part.memory["optimizer"] == 2 * trained + 4 * 10  # two moments, three counters, seven numbers of the run
    assert part.flops < all_of_it.flops


def test_utilisation_is_that_of_the_backward_pass_of_all_parameters(monkeypatch):
    monkeypatch.setattr(monitoring, "peak_flops", lambda kind, dtype: 1e12)
    assert monitoring.utilisation_per_rate(make_config()) > 0
    assert monitoring.utilisation_per_rate(training(make_config(), *PATTERNS)) is None
