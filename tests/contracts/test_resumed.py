"""Contract 8: what is saved and restored goes on bit for bit, in every named config. Kills: training/test_resume.py."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.contracts.variants import NAMED
from tests.training.test_step import make_batch
from xfresearch.config import Config, OptimizerConfig, TrainingConfig
from xfresearch.resolving import resolve
from xfresearch.training import checkpoint
from xfresearch.training.optimizer import make_optimizer
from xfresearch.training.step import init_state, make_train_step


@pytest.mark.parametrize("name", NAMED)
def test_a_restored_state_goes_on_bit_for_bit(name, tmp_path):
    model = replace(NAMED[name], dropout=0.1)
    config = Config(
        steps=4, batch_size=4, sequence_length=8, model=model, training=TrainingConfig(ema=0.9, layers="scan")
    )
    config = resolve(replace(config, optimizer=OptimizerConfig(kind="muon", warmup=0)))
    optimizer = make_optimizer(config.optimizer, config.steps)
    step = jax.jit(make_train_step(config, optimizer))
    batches = [make_batch([8] * 4, seed=seed, V=model.vocab_size) for seed in range(4)]
    state = init_state(config, optimizer)
    for number, batch in enumerate(batches):
        state, _ = step(state, batch)
        if number == 1:
            checkpoints = checkpoint.Checkpoints(tmp_path, config.checkpoint)
            checkpoints.save(2, state, {})
            checkpoints.close()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    resumed, _ = checkpoint.restore(tmp_path, 2, abstract)
    for batch in batches[2:]:
        resumed, _ = step(resumed, batch)
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
