"""The training step and the shapes of its arguments, for runs (before their first step) and plans."""

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
    """The config with model.vocab_size filled in. Raises UserError if it is set below what the tokenizer needs."""
    model = config.model
    allowed = f"0 or at least {needed}, which data.tokenizer={config.data.tokenizer!r} needs"
    require(not 0 < model.vocab_size < needed, "model.vocab_size", model.vocab_size, allowed)
    return replace(config, model=replace(model, vocab_size=model.vocab_size or needed))


def abstract_state(config: Config, optimizer, mesh):
    """The training state as sharded jax.ShapeDtypeStructs on `mesh`, which may be abstract."""
    shapes = jax.eval_shape(lambda seed: init_state(config, optimizer, seed), config.seed)
    return jax.tree.map(sharded, shapes, state_shardings(mesh, shapes, transformer.axes(config.model)))


def abstract_batch(config: Config, mesh) -> dict:
    """A whole batch (of all processes) as the data pipeline makes it, as sharded jax.ShapeDtypeStructs."""
    shape = (config.batch_size, config.sequence_length)
    return {
        name: sharded(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), batch_sharding(mesh))
        for name, dtype in BATCH.items()
    }


def jit_train_step(config: Config, optimizer, mesh, state):
    """The jitted training step. It donates the state. The new state has the shardings of the (abstract) `state`."""
    # Metrics are replicated, so that every process can read them.
    out = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec()))
    return jax.jit(make_train_step(config, optimizer, mesh), donate_argnums=0, out_shardings=out)


def sharded(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
