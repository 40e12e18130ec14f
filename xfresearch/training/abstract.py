"""The training step and what it takes, without arrays: what a run compiles before its first step, and a plan without it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from xfresearch.config.run import Config
from xfresearch.errors import require
from xfresearch.models import transformer
from xfresearch.sharding.partition import batch_sharding, state_shardings
from xfresearch.training.step import init_state, make_train_step

BATCH = {"tokens": "int32", "targets": "int32", "segments": "int32", "positions": "int32", "weights": "float32"}


def with_vocabulary(config: Config, needed: int) -> Config:
    """The config with model.vocab_size known; UserError where it is set below what the tokenizer needs."""
    model = config.model
    needs = f"0 or at least {needed}, which tokenizer={config.data.tokenizer!r} needs"
    require(not 0 < model.vocab_size < needed, "model.vocab_size", model.vocab_size, needs)
    return replace(config, model=replace(model, vocab_size=model.vocab_size or needed))


def abstract_state(config: Config, optimizer, mesh):
    """The training state as jax.ShapeDtypeStruct with shardings on `mesh`, which may be abstract."""
    shapes = jax.eval_shape(lambda seed: init_state(config, optimizer, seed), config.seed)
    return jax.tree.map(placed, shapes, state_shardings(mesh, shapes, transformer.axes(config.model)))


def abstract_batch(config: Config, mesh) -> dict:
    """A whole batch of all processes, as the data pipeline gives it."""
    shape = (config.batch_size, config.sequence_length)
    return {
        name: placed(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), batch_sharding(mesh))
        for name, dtype in BATCH.items()
    }


def jit_train_step(config: Config, optimizer, mesh, state):
    """The training step, jitted: the state's buffers are donated, the new state lies where `state` (or its shape) does."""
    # Metrics are whole on every device, so that every process can read them.
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec()))
    return jax.jit(make_train_step(config, optimizer, mesh), donate_argnums=0, out_shardings=out)


def placed(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
