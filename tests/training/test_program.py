"""One program serves every seed, learning rate, weight decay and number of steps, alone and under vmap."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from tests.tolerances import TOLERANCE, relative_error
from tests.training.test_step import make_batch, make_config
from xfresearch.sharding.mesh import make_mesh
from xfresearch.training.hyperparameters import OF_OPTIMIZER, hyper_of, without_hyper
from xfresearch.training.program import Program, _quick_compilation, shared_program

LENGTHS = [8] * 8
OTHERS = {"learning_rate": 3e-2, "weight_decay": 0.3, "warmup": 1, "final_fraction": 0.5, "decay_fraction": 0.8}


def config_of(seed: int = 0, steps: int = 6, **optimizer):
    config = make_config()
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup": 2, "decay_fraction": 0.5, "schedule": "wsd"} | optimizer
    return replace(config, seed=seed, steps=steps, optimizer=replace(config.optimizer, **options))


@cache
def jitted(program: Program):
    return jax.jit(program.init), jax.jit(program.update)


def trained(program: Program, config, updates: int = 5):
    init, update = jitted(program)
    state = init(hyper_of(config))
    for seed in range(updates):
        state, metrics = update(state, make_batch(LENGTHS, seed))
    return state, metrics


def test_runs_of_one_shape_share_a_program():
    base = shared_program(config_of())
    for name in OF_OPTIMIZER:
        assert shared_program(config_of(seed=3, steps=9, **{name: OTHERS[name]})) is base
    assert shared_program(config_of(schedule="cosine")) is not base
    assert shared_program(replace(config_of(), batch_size=4)) is not base


def test_the_numbers_of_the_state_are_what_they_are_in_the_config():
    """The shared program with all numbers as data equals the program of their config."""
    config = config_of(seed=7, steps=7, **OTHERS)
    assert set(OTHERS) == set(OF_OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, trained(shared_program(config), config), trained(Program(config), config))


@pytest.mark.parametrize("name", ["seed", "steps", *OF_OPTIMIZER])
def test_each_number_has_an_effect(name):
    config = config_of(**{name: OTHERS.get(name, 7)})
    actual, base = (trained(shared_program(each), each)[0]["params"] for each in (config, config_of()))
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), actual, base)))


def test_init_compiles_with_a_level_of_xla_flags_or_a_low_one_on_the_cpu(monkeypatch):
    mesh, abstract = make_mesh(config_of()), AbstractMesh((2,), ("data",))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert _quick_compilation(mesh) == {"xla_backend_optimization_level": 1}
    assert _quick_compilation(abstract) == _quick_compilation(None) == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    assert _quick_compilation(mesh) == {}


def test_runs_may_be_mapped_over_their_numbers():
    """Seeds and learning rates in one program equal separate runs within float32 noise."""
    configs = [config_of(seed=seed, learning_rate=rate) for seed, rate in ((0, 1e-2), (1, 1e-2), (1, 3e-2))]
    program = Program(without_hyper(configs[0]))
    states = jax.vmap(program.init)(jax.tree.map(lambda *leaves: np.stack(leaves), *map(hyper_of, configs)))
    update = jax.jit(jax.vmap(program.update, (0, None)))
    for seed in range(5):
        states, metrics = update(states, make_batch(LENGTHS, seed))
    for number, config in enumerate(configs):
        state, alone = trained(program, config)
        own = jax.tree.map(lambda leaf, number=number: leaf[number], states)
        for actual, expected in zip(*map(jax.tree.leaves, (own["params"], state["params"])), strict=True):
            assert relative_error(actual, expected) < 10 * TOLERANCE["float32"]
        np.testing.assert_allclose(metrics["loss"][number], alone["loss"], rtol=1e-5)


def test_dropout_follows_the_seed_of_the_state():
    config = config_of()
    config = replace(config, model=replace(config.model, dropout=0.5))
    program = Program(without_hyper(config))
    state, batch = program.init(hyper_of(config)), make_batch(LENGTHS)
    other = state | {"hyper": state["hyper"] | {"seed": np.int32(1)}}
    update = jax.jit(program.update)
    assert update(state, batch)[1]["loss"] != update(other, batch)[1]["loss"]
