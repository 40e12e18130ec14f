"""How long an update takes on this machine, for several configs side by side."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from xfresearch.config.run import Config

ROUNDS = 7


class Timer:
    """Calls of it run one update of a config, and return its seconds. The first update, which compiles, has run.

    runs: update as many runs of different seeds in one program (jax.vmap).
    """

    def __init__(self, config: Config, runs: int = 1):
        import jax

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


def timed_rounds(timers: Sequence[Callable[[], float]], rounds: int) -> np.ndarray:
    """Seconds and page faults of every call, an array [2, timers, rounds]. Every round calls each timer once."""
    measured = np.zeros((2, len(timers), rounds))
    for number in range(rounds):
        for i, timer in enumerate(timers):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            measured[0, i, number] = timer()
            measured[1, i, number] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return measured


def seconds_per_update(configs: Mapping) -> dict:
    """The fastest update of each of {name: Config}. A busy machine slows all of them equally."""
    seconds_NR, _ = timed_rounds([Timer(config) for config in configs.values()], ROUNDS)
    return dict(zip(configs, seconds_NR.min(axis=1).tolist(), strict=True))
