"""Several runs of one shape, trained at once: their states are stacked, and jax.vmap maps the update over them.

Only the update is shared. Each run has its own directory, batches, measurements, rows and checkpoints, as if it trained
alone, and may go on alone. Batched products add in another order, so roundings differ from those of a run alone, as they do
on another machine. A run that diverges ends, and the others go on. There is one process with one device.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import jax
import numpy as np

from xfresearch.data.pipeline import Prefetch
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import Diverged
from xfresearch.runtime.progress import stage
from xfresearch.sharding.first_execution import alone_at_first
from xfresearch.training.callbacks import Callbacks
from xfresearch.training.feed import Feed
from xfresearch.training.fitting import fitting
from xfresearch.training.loop import Result, Trainer, updates
from xfresearch.training.metrics import Clock
from xfresearch.training.program import stacked
from xfresearch.training.schedule import due
from xfresearch.training.stopping import StopSignal


class SharedClock(Clock):
    """The clock of each of several runs that train together: it has an equal share of their time."""

    def __init__(self, runs: int):
        super().__init__(lambda: time.perf_counter() / runs)
        self._runs, self._counted = runs, 0

    def set(self, kind: str, seconds: float) -> None:
        super().set(kind, seconds / self._runs)

    def count(self, tokens: int) -> None:
        """Each run counts its tokens."""
        self._counted += tokens
        self.tokens = self._counted // self._runs

    def restore(self, state: dict[str, float]) -> None:
        """Each run restores its own state."""
        super().restore({kind: seconds / self._runs for kind, seconds in state.items() if kind != "tokens"})
        self.count(int(state.get("tokens", 0)))


class Together:
    """Runs that train together. It has what `loop.updates` asks of a run, and does for each what the run does alone."""

    panel, callbacks = None, Callbacks(())

    def __init__(self, runs: Sequence[Trainer], progress: Callable[[int], None]):
        first = runs[0]
        self.runs, self.progress = runs, progress
        self.config, self.clock, self.emergency = first.config, first.clock, first.emergency
        self.start = self.done = first.start
        self.failed: dict[Trainer, Diverged] = {}
        self.losses: dict[Trainer, float | None] = {}  # held-out ones, which rank the next checkpoints
        self.state = stacked(*(run.state for run in runs))
        for run in runs:
            run.state = {}
        self.program, own = first.program, first.program.shardings
        self._state_of = jax.jit(_of, out_shardings=own)

    @property
    def alive(self) -> list[Trainer]:
        """The runs that have not failed."""
        return [run for run in self.runs if run not in self.failed]

    @property
    def unmeasured(self) -> bool:
        return any(run.unmeasured for run in self.alive)

    @property
    def checkpoints(self):
        """Those of one run: all save after the same updates."""
        return self.alive[0].checkpoints

    def compiled_update(self) -> Callable:
        batch = self.program.abstract_batch
        shapes = {name: jax.ShapeDtypeStruct((len(self.runs), *each.shape), each.dtype) for name, each in batch.items()}
        compiled = self.program.mapped_update.lower(self.state, shapes).compile()
        return fitting(compiled, self.config, self.runs[0].mesh)

    def read(self, step: int) -> dict[str, np.ndarray]:
        """The batches of all runs [runs, B, L]."""
        batches = [run.batches.batch(step, run.rows) for run in self.runs]
        return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    def update(self, step_function: Callable, step: int, batch: dict, waited: float) -> tuple:
        first = self.runs[0]
        first.state = self.state
        metrics = first.update(step_function, step, batch, waited)
        self.state, first.state = first.state, {}
        return metrics

    def report(self, step: int, metrics: dict, host_times=None) -> None:
        fetched = jax.device_get(jax.block_until_ready(metrics))
        for run in self.alive:
            with self._failing(run):
                run.report(step, _of(self.runs.index(run), fetched))
        self.progress(step)

    def measure(self, step: int, stopping) -> None:
        """At the update that the runs go on from, only what an earlier process has left out."""
        self.losses = {}
        all_due = self.alive if any(due(self.config, step)) else []
        for run in self._with_states([run for run in self.alive if run.unmeasured] if step == self.start else all_due):
            with self._failing(run):
                self.losses[run] = run.measure(step, stopping)

    def save(self, step: int, loss: float | None, in_memory: bool = False) -> None:
        for run in self._with_states(self.alive):
            with self._failing(run):
                run.save(step, self.losses.get(run))

    def results(self, stopped_by: str) -> list[Result | Diverged]:
        """The result of each run, or the error of one that has diverged."""
        for run in self.alive:
            run.done, run.state = self.done, self._state_of(self.runs.index(run), self.state)
        return [self.failed.get(run) or run.result(stopped_by) for run in self.runs]

    def _with_states(self, runs: Sequence[Trainer]) -> Iterator[Trainer]:
        """Each of the runs, which has its state meanwhile."""
        for run in runs:
            run.state = self._state_of(self.runs.index(run), self.state)
            yield run
            run.state = {}

    @contextmanager
    def _failing(self, run: Trainer) -> Iterator[None]:
        """A run that diverges fails alone. The last one ends all."""
        try:
            yield
        except Diverged as error:
            self.failed[run] = error
            if not self.alive:
                raise


def _of(number, tree):
    """What a tree has of the run with this number."""
    return jax.tree.map(lambda leaf: leaf[number], tree)


def train(
    configs: Sequence[Config], workdirs: Sequence, tokenizer, clock: SharedClock, progress: Callable[[int], None]
) -> list[Result | Diverged]:
    """`loop.train` of runs whose configs differ only in numbers that the program takes as data (hyperparameters.py). Returns
    what it returns for each of them, or the error of one that has diverged. progress: gets the number of each update.

    Returns [] if the runs do not go on from one update: others may train together. Raises UserError as `loop.train` does,
    and NotImplementedError for an update that cannot be mapped.
    """
    with clock.measure("start"):
        each = zip(configs, workdirs, strict=True)
        runs = [Trainer(config, workdir, tokenizer, clock, False, None, (), {}) for config, workdir in each]
        if len({run.start for run in runs}) > 1:  # a checkpoint was damaged
            for run in runs:
                run.log.close()
                run.checkpoints.close()
            return []
        group = Together(runs, progress)
        steps, step_function = range(group.start, group.config.steps), None
        if steps:
            with clock.measure("compile"), stage("compiling the update"):
                step_function = alone_at_first(group.compiled_update())
        for run in runs:
            run.write_beginning(tokenizer)
    stopping, ahead = StopSignal(), group.config.data.prefetch
    batches = Feed(Prefetch(group.read, steps, ahead), jax.device_put, ahead)
    clock.begin()
    try:
        with suppress(Diverged):  # all of them
            updates(group, step_function, batches, stopping)
        with clock.measure("checkpoint"):
            for run in runs:
                run.checkpoints.close()
    finally:
        clock.end()
        for run in runs:
            run.log.close()
        if runs[0].profile:
            runs[0].profile.close()
        batches.close()
        stopping.restore()
    return group.results(stopping.received)
