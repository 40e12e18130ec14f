"""How long an update takes on this machine, for several configs side by side."""

import time
from collections.abc import Mapping
from dataclasses import replace

from xfresearch.config.run import Config

ROUNDS = 7


class Timer:
    """Calls of it run one update of a config, and return its seconds. The first update, which compiles, has run.

    runs: update as many runs of different seeds in one program (jax.vmap).
    """

    def __init__(self, config: Config, runs: int = 1):
        import jax
        import numpy as np

        from xfresearch.data.pipeline import Batches
        from xfresearch.sharding.mesh import make_mesh
        from xfresearch.training import loop
        from xfresearch.training.hyper import hyper_of
        from xfresearch.training.program import shared_program

        loop.setup_jax(config)
        program, batch = shared_program(config, make_mesh(config)), Batches(config).batch(0)
        if runs == 1:
            self._update, self._batch, self._state = program.jit_update, batch, program.jit_init(hyper_of(config))
        else:
            hypers = [hyper_of(replace(config, seed=seed)) for seed in range(runs)]
            self._update = jax.jit(jax.vmap(program.update), donate_argnums=0)
            self._batch = {name: np.stack([value] * runs) for name, value in batch.items()}
            self._state = jax.jit(jax.vmap(program.init))(jax.tree.map(lambda *values: np.stack(values), *hypers))
        self()

    def __call__(self) -> float:
        import jax

        began = time.perf_counter()
        self._state, _ = jax.block_until_ready(self._update(self._state, self._batch))
        return time.perf_counter() - began


def seconds_per_update(configs: Mapping) -> dict:
    """The fastest update of each of {name: Config}. Every round runs each of them once, so that a busy machine slows all
    equally."""
    timers = {name: Timer(config) for name, config in configs.items()}
    rounds = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
    return {name: min(each[name] for each in rounds) for name in timers}
