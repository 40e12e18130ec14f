"""One compiled program for all runs of one shape: seed, steps, learning rate and weight decay are data (hyperparameters.py).

    program = shared_program(config, mesh)
    state = program.init(hyper_of(config))                # or program.start(params, hyper)
    state, metrics = program.update(state, batch)
    sums = program.evaluate(state["params"], batch, byte_lengths_V)

`init` and `update` are pure functions: `mapped_update`, jax.vmap over the state, trains several runs in one program. The
other jitted forms place the state on the mesh, which may be abstract (planning).
"""

import os
from collections.abc import Callable
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xfresearch.evaluation.losses import make_evaluator
from xfresearch.models import transformer
from xfresearch.models.context import SOURCE
from xfresearch.run_config.config import Config
from xfresearch.runtime.trees import join
from xfresearch.sharding.partition import batch_sharding, state_shardings
from xfresearch.training.hyperparameters import hyper_of, learning_rate, without_hyper
from xfresearch.training.kernel_choices import has_prefixes, layers_choice
from xfresearch.training.optimizer import require_targets, require_trainable, trainable, update_rule
from xfresearch.training.step import (
    all_finite,
    init_params,
    layer_norms,
    make_gradients,
    router_metrics,
    tokens_in,
    totals_of,
    within_bounds,
)

BATCH = {"tokens": "int32", "targets": "int32", "segments": "int32", "positions": "int32", "weights": "float32"}


class Program:
    """The program of a config on a mesh (None: JAX's default device). Raises UserError if a pattern of
    config.optimizer.trainable matches no parameter."""

    def __init__(self, config: Config, mesh=None):
        self.config, self.mesh = config, mesh
        axes = transformer.axes(config.model)
        require_trainable(config.optimizer, axes)
        require_targets(config.model)
        self.trained_axes = trainable(config.optimizer, axes)[0]
        self.rule = update_rule(config.optimizer, self.trained_axes)
        self.gradients = make_gradients(config, mesh)

    def init(self, hyper: dict) -> dict:
        """The state before the first update, with new parameters; every leaf is an array."""
        return self.start(init_params(self.config, hyper["seed"]), hyper)

    def start(self, params: dict, hyper: dict) -> dict:
        """The state before the first update of these parameters."""
        opt = self.rule.init(trainable(self.config.optimizer, params)[0])
        state = {"params": params, "opt": opt, "hyper": hyper, "step": jnp.int32(0), "skipped": jnp.int32(0)}
        return state | ({"ema": jax.tree.map(jnp.copy, params)} if self.config.training.ema else {})

    def update(self, state: dict, batch: dict) -> tuple[dict, dict]:
        """(the next state, metrics of this update). Metrics that are dicts have values by layer."""
        config, step, hyper = self.config, state["step"], state["hyper"]
        drawn = jax.random.fold_in(jax.random.fold_in(jax.random.key(hyper["seed"]), 1), step)
        key = drawn if config.model.random else None
        trained, frozen = trainable(config.optimizer, state["params"])
        (_, metrics), grads = self.gradients(trained, frozen, batch, key, totals_of(batch))
        norm = optax.tree.norm(grads)
        updates, opt = self.rule.update(grads, state["opt"], trained, step=step, hyper=hyper)
        statistics = metrics.pop("statistics")
        trained = within_bounds(optax.apply_updates(trained, updates), self.trained_axes)
        params = transformer.after_update(config.model, join(trained, frozen), statistics)
        params = join(params, frozen)
        new = {**state, "params": params, "opt": opt, "step": step + 1}
        if config.training.ema:
            decay = config.training.ema
            averages = jax.tree.map(lambda old, p: decay * old + (1 - decay) * p, state["ema"], params)
            new["ema"] = join(averages, frozen)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        if config.training.on_nonfinite == "skip":
            finite &= all_finite((trainable(config.optimizer, params)[0], opt))
            kept = {**state, "step": step + 1, "skipped": state["skipped"] + 1}
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, kept)
        rate = learning_rate(config.optimizer.schedule, hyper, step)
        metrics |= {"gradient_norm": norm, "learning_rate": rate, "tokens": batch["weights"].sum()}
        metrics |= {"finite": finite, "skipped": new["skipped"]}
        metrics |= router_metrics(statistics, tokens_in(batch))
        if config.log.layer_norms:
            trees = {"parameter": state["params"], "gradient": grads, "update": updates}
            metrics |= {f"{name}_norms": layer_norms(tree) for name, tree in trees.items()}
        return new, metrics

    @cached_property
    def evaluate(self) -> Callable:
        """The jitted evaluator of a batch (evaluation/losses.py)."""
        mode = str(layers_choice(self.config, self.mesh).name)
        return make_evaluator(self.config.model, mode, self.config.training.loss_rows, self.mesh)

    @cached_property
    def shapes(self) -> dict:
        """The state as jax.ShapeDtypeStructs."""
        return jax.eval_shape(self.init, hyper_of(self.config))

    @cached_property
    def shardings(self) -> dict:
        """The shardings of the state on the mesh."""
        return state_shardings(self.mesh, self.shapes, transformer.axes(self.config.model))

    @cached_property
    def abstract_state(self) -> dict:
        """The state as sharded jax.ShapeDtypeStructs."""
        return jax.tree.map(sharded, self.shapes, self.shardings)

    @cached_property
    def abstract_batch(self) -> dict:
        """A whole batch (of all processes) as the data pipeline makes it, as sharded jax.ShapeDtypeStructs."""
        return {name: sharded(leaf, batch_sharding(self.mesh)) for name, leaf in batch_shapes(self.config).items()}

    @cached_property
    def jit_init(self) -> Callable:
        return jax.jit(self.init, out_shardings=self.shardings, compiler_options=_quick_compilation(self.mesh))

    @cached_property
    def jit_start(self) -> Callable:
        """It donates the parameters."""
        return jax.jit(self.start, out_shardings=self.shardings, donate_argnums=0)

    @cached_property
    def jit_update(self) -> jax.stages.Wrapped:
        """It donates the state. Metrics are replicated, so that every process can read them."""
        out = self.shardings, NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(self.update, out_shardings=out, donate_argnums=0)

    @cached_property
    def compiled_update(self) -> jax.stages.Compiled:
        """The update, compiled for the shapes of a run."""
        return self.jit_update.lower(self.abstract_state, self.abstract_batch).compile()

    @cached_property
    def mapped_update(self) -> jax.stages.Wrapped:
        """The update of several runs on one device: each leaf of the state (`stacked`), of the batch and of the metrics has
        their number as its first dimension. It donates the state."""
        return jax.jit(jax.vmap(self.update), donate_argnums=0)


@jax.jit
def stacked(*states: dict) -> dict:
    """The states of several runs as one, for `mapped_update`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@lru_cache(maxsize=2)
def _program(config: Config, mesh) -> Program:
    return Program(config, mesh)


def shared_program(config: Config, mesh=None) -> Program:
    """The program of a config: the same object for configs that differ only in what `without_hyper` leaves out."""
    return _program(without_hyper(config), mesh)


def _quick_compilation(mesh) -> dict:
    """XLA's options for `init` on the CPU. At LLVM's level 1 it compiles in a third of the time of level 3, runs as fast,
    and gives the same bits. A level in XLA_FLAGS takes precedence."""
    on_cpu = isinstance(mesh, Mesh) and {device.platform for device in mesh.devices.flat} == {"cpu"}
    chosen = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")
    return {"xla_backend_optimization_level": 1} if on_cpu and not chosen else {}


def arrays_of(config: Config) -> dict[str, str]:
    """{name: dtype} of the arrays [B, L] of a batch. Prefixes of a single stack have one of their own."""
    return BATCH | ({"prefix": "int32"} if has_prefixes(config) else {})


def batch_shapes(config: Config) -> dict:
    """A whole batch as jax.ShapeDtypeStructs. With an encoder it has the sources [B, S] too."""
    rows, length = config.batch_size, config.source_length
    shapes = {name: ((rows, config.sequence_length), dtype) for name, dtype in arrays_of(config).items()}
    shapes |= {name: ((rows, length), dtype) for name, dtype in SOURCE.items()} if length else {}
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()}


def sharded(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
