"""The training loop: batches -> step -> metrics, with evaluation, checkpoints and an exact resume around it.

    state = newest good checkpoint, or a fresh one
    for step, batch in batches from state.step on:
        state, metrics = train_step(state, batch)          # returns at once; the device works on
        report the metrics of the step before              # so that the host never waits for the device
        evaluate and save where they are due

The batch is a function of (seed, step) alone and every random number of the step too, so that a resumed run goes on
bit for bit as if it had never stopped.
"""

import os
import signal
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from xfresearch import distributed
from xfresearch.checkpoints import store
from xfresearch.checkpoints.newest import newest_intact
from xfresearch.config.run import Config
from xfresearch.data.cache import keep_programs
from xfresearch.data.pipeline import Batches, evaluation_batches, prepare
from xfresearch.errors import Stopped, UserError
from xfresearch.evaluation import evaluate_batches, make_evaluator
from xfresearch.hardware import peak_flops
from xfresearch.models.closed_form import costs
from xfresearch.sharding.mesh import make_mesh
from xfresearch.sharding.partition import batch_sharding
from xfresearch.sharding.placing import even, place, rows_of
from xfresearch.training.abstract import abstract_state, jit_train_step
from xfresearch.training.kernel_choices import kernel_choices
from xfresearch.training.metrics import Clock, MetricsLog, Progress, Silent, bits_per_byte
from xfresearch.training.optimizer import make_optimizer
from xfresearch.training.step import init_state, layers_mode
from xfresearch.training.watching import HostTimes, Profile
from xfresearch.training.workdir import keep, starts, time_gone


class Result(NamedTuple):
    step: int
    evaluation: dict  # of the last step: loss, accuracy, ... ({} where there was none)
    clock: Clock
    params: dict  # what evaluation uses: averaged weights where the run keeps them
    stopped_by: str  # the signal that ended it early, or ''


def setup_jax(config: Config) -> None:
    """Process-wide settings: 64-bit numbers where the config asks for them, and compiled programs kept on disk."""
    jax.config.update("jax_enable_x64", config.model.param_dtype == "float64")
    keep_programs(config.data)


class Run:
    """Everything that one training process holds. Built in full before the first step, so that mistakes show early."""

    def __init__(self, config: Config, workdir, tokenizer, clock: Clock):
        self.config, self.workdir, self.clock = config, epath.Path(workdir), clock
        self.mesh = make_mesh(config)
        self._say_kernels()
        self.at = batch_sharding(self.mesh)
        with self.clock.measure("input"):
            self.batches = Batches(config)
            self.heldout = prepare(config, config.evaluation.split) if config.evaluation.every else None
        distributed.heed_notices(True)  # one that comes while programs are compiled is not lost
        self.bytes_per_token = _bytes_per_token(self.batches)
        self.byte_lengths = tokenizer.byte_lengths if tokenizer else None
        self.utilisation_per_rate = _utilisation_per_rate(config)
        self.rows = self.rows_of(config.batch_size)
        self.optimizer = make_optimizer(config)
        with self.clock.measure("compile"):
            self.state, meta = self._start()
        self.start = int(self.state["step"])
        self._restore_clock(meta)
        self.checkpoints = store.Checkpoints(workdir, config.checkpoint)
        self.log, self.progress = Silent(), Silent()
        if distributed.first():
            self.log = MetricsLog(workdir, resume_step=self.start, tensorboard=config.log.tensorboard)
            self.progress = Progress(config.steps, self.start, self.bytes_per_token)
        self.profile = Profile(workdir, config.log) if distributed.first() else None
        self.host_times = HostTimes(self.mesh) if distributed.several() else None
        self.evaluate_batch = make_evaluator(
            config.model, layers_mode(config, self.mesh), config.training.loss_rows, self.mesh
        )
        self.last_evaluation = meta.get("evaluation", {})

    def _start(self) -> tuple[dict, dict]:
        """The newest checkpoint that is whole, named on standard error where one is not, or a fresh state."""

        def make(seed) -> dict:
            return init_state(self.config, self.optimizer, seed)

        abstract = abstract_state(self.config, self.optimizer, self.mesh)
        steps = store.steps(self.workdir)
        found = newest_intact(steps, lambda step: store.restore(self.workdir, step, abstract))
        if found is not None:
            step, state_and_meta = found
            damaged = [other for other in steps if other > step]
            distributed.first_does(lambda: self._set_aside(damaged), "moving damaged checkpoints")
            return state_and_meta
        if steps:
            raise UserError(
                f"--workdir={self.workdir}: every checkpoint in it is damaged, or of another model or optimizer: use a new "
                "one"
            )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return jax.jit(make, out_shardings=shardings)(self.config.seed), {}

    def _say_kernels(self) -> None:
        """Names the kernel of each sublayer that has several, and why; UserError where the one asked for cannot serve."""
        choices = kernel_choices(self.config, self.mesh)
        if distributed.first():
            for (block, sublayer), choice in choices.items():
                print(f"{sublayer} of block {block}: {choice.name} ({choice.reason})", file=sys.stderr)

    def _set_aside(self, damaged: list[int]) -> None:
        for bad in damaged:
            print(f"warning: moved checkpoint {bad} to {store.set_aside(self.workdir, bad)}", file=sys.stderr)

    def _restore_clock(self, meta: dict) -> None:
        """Counts what the processes before have, and what went to nothing since the checkpoint of `meta`."""
        past = starts(self.workdir)
        if past:  # a run of the library's own keeps no record of its starts
            self.clock.restore(meta.get("clock", {}))
            self.clock.restore(time_gone(past, meta.get("saved_at", past[0]["seconds"])))

    def compile(self):
        """The training step, compiled for the shapes of this run."""
        first = self.batches.batch(self.start, self.rows)
        step = jit_train_step(self.config, self.optimizer, self.mesh, self.state)
        with self.clock.measure("compile"):
            return step.lower(self.state, self.place(first)).compile()

    def rows_of(self, batch_size: int) -> np.ndarray:
        """The rows of a batch that this process reads."""
        return rows_of(self.at, (batch_size, self.config.sequence_length))

    def place(self, batch: dict) -> dict:
        """A training batch, of which this process has read its rows, as arrays on the mesh."""
        return place(self.at, (self.config.batch_size, self.config.sequence_length), self.rows, batch)

    def update(self, step_function, step: int, batch: dict, waited: float) -> tuple:
        """Hands update number `step` to the devices; its metrics, and with them now and then the hosts' times."""
        if self.profile:
            self.profile.before(step)
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            self.state, metrics = step_function(self.state, batch)
        gathered = None
        if self.host_times:
            self.host_times.count(time.perf_counter() - began, waited)
            gathered = self.host_times.gather() if self.host_times.due(step, self.config.log.every) else None
        if self.profile:
            self.profile.after(step, metrics)
        return metrics, gathered

    @property
    def params(self) -> dict:
        return self.state.get("ema", self.state["params"])

    def report(self, step: int, metrics: dict, host_times=None) -> None:
        """Reads the metrics of an update that the device has finished; Stopped where it was not finite."""
        metrics = jax.tree.map(np.asarray, metrics)
        finite, tokens = bool(metrics.pop("finite")), int(metrics.pop("tokens"))
        values = {name: float(v) for name, v in metrics.items() if not isinstance(v, dict)}
        self.clock.count(tokens)
        if self.bytes_per_token:
            values["bits_per_byte"] = bits_per_byte(values["loss"], self.bytes_per_token)
        values["tokens_per_second"] = self.clock.rate()
        if self.utilisation_per_rate:
            values["model_flops_utilisation"] = self.utilisation_per_rate * values["tokens_per_second"]
        if not finite and self.config.training.on_nonfinite == "stop":
            self.checkpoints.wait()  # one that is on its way is good
            saved = store.steps(self.workdir)
            good = f"the last good checkpoint is step {saved[-1]}" if saved else "there is no checkpoint yet"
            raise Stopped(f"the loss or gradient of step {step} (batch {step - 1}) is not finite; {good}")
        if self.config.training.on_nonfinite == "stop":
            values.pop("skipped")
        if host_times is not None:
            values["host_seconds"] = self.host_times.spread(host_times)
        self.progress.update(step, values["loss"], tokens)
        if step % self.config.log.every == 0 or step == self.config.steps:
            layers = {name: v for name, v in metrics.items() if isinstance(v, dict)}
            self.log.write(
                step, "train", values | {k: {n: a.tolist() for n, a in v.items()} for k, v in layers.items()}
            )

    def evaluate(self, step: int) -> dict:
        """Held-out loss with the parameters of now, logged."""
        limits = self.config.evaluation
        limit = limits.final_sequences if step == self.config.steps else limits.sequences
        size = even(self.mesh, limits.batch_size or self.config.batch_size)
        rows, shape = self.rows_of(size), (size, self.config.sequence_length)
        batches = evaluation_batches(self.heldout, size, limit, rows)
        placed = (place(self.at, shape, rows, batch) for batch in batches)
        with self.clock.measure("evaluation"):
            values = evaluate_batches(self.evaluate_batch, self.params, placed, self.byte_lengths)
        self.log.write(step, "evaluation", values)
        self.last_evaluation = values
        return values

    def save(self, step: int, loss: float | None) -> None:
        with self.clock.measure("checkpoint"):
            self.log.flush()
            meta = {"clock": self.clock.state(), "saved_at": time.time(), "evaluation": self.last_evaluation}
            self.checkpoints.save(step, self.state, meta, loss)


def train(config: Config, workdir, tokenizer, clock: Clock | None = None) -> Result:
    """Trains from the newest checkpoint in `workdir` (or from scratch) to config.steps and returns the outcome. `tokenizer`
    is None for a data set with labels; `clock` may have counted what went before.

    Saves and returns early on SIGTERM or SIGINT, of many processes whichever it reaches. Raises Stopped where the loss is
    not finite or a checkpoint cannot be written, UserError where the config does not fit the devices or the data.
    """
    clock = clock or Clock()
    with clock.measure("start"):
        run = Run(config, workdir, tokenizer, clock)
        step_function = run.compile() if run.start < config.steps else None
        # Not before: a directory is not to take the config of a mistake, with which nothing was ever trained.
        distributed.first_does(lambda: keep(run.workdir, config, tokenizer), "writing the config")
    if not step_function:
        distributed.heed_notices(False)
        return Result(run.start, run.last_evaluation, run.clock, run.params, "")
    stopping = PreemptionNotice() if distributed.several() else StopSignal()
    batches = run.batches.iterate(run.start, config.steps, run.rows, run.place)
    pending, done = None, run.start
    run.clock.begin()
    try:
        for index, batch in batches:
            metrics = run.update(step_function, index + 1, batch, batches.wait_seconds)
            if pending:
                run.report(*pending)
            pending, done = (index + 1, *metrics), index + 1
            evaluating = _due(done, config.evaluation.every, config.steps)
            stopping_now = stopping.reached(done)
            saving = _due(done, config.checkpoint.every, config.steps) or stopping_now
            run.clock.set("input", batches.wait_seconds)
            if evaluating or saving:
                run.report(*pending)  # nothing that is not finite is ever saved
                pending = None
            loss = run.evaluate(done)["loss"] if evaluating else None
            if saving:
                run.save(done, loss)
            if stopping_now:
                break
        with run.clock.measure("checkpoint"):
            run.checkpoints.wait()
    finally:
        run.clock.end()
        if run.profile:
            run.profile.close()
        run.progress.close()
        run.log.close()
        batches.close()
        stopping.restore()
    run.checkpoints.close()
    return Result(done, run.last_evaluation, run.clock, run.params, stopping.received if done < config.steps else "")


class StopSignal:
    """Notes SIGTERM or SIGINT, so that the loop can save before it ends. A second SIGINT ends the process at once."""

    def __init__(self):
        self.received = ""
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number, frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def reached(self, step: int) -> bool:
        """Whether the run is to stop after update `step`, which is done."""
        return bool(self.received)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class PreemptionNotice:
    """The same among many processes: a signal to any of them stops all after one and the same update.

    JAX takes SIGTERM (distributed.heed_notices) and agrees on the step. SIGINT is passed on as a SIGTERM; a second one
    ends the process at once.
    """

    def __init__(self):
        self.received, self._interrupts, self._asked = "", 0, 0
        self.before = signal.signal(signal.SIGINT, self._note)

    def _note(self, number, frame):
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Whether the run is to stop after update `step`; every process has to ask about every update."""
        from jax.experimental import multihost_utils

        # Counted from 0, not by step: a notice that comes before the first question has 0 for its answer.
        if multihost_utils.reached_preemption_sync_point(self._asked):
            self.received = "SIGTERM"
        self._asked += 1
        return bool(self.received)

    def restore(self) -> None:
        signal.signal(signal.SIGINT, self.before)
        if not self.received:  # after a notice, each process may still get one of its own
            distributed.heed_notices(False)


def _bytes_per_token(batches: Batches) -> float | None:
    """None where the data are no text."""
    metas = [corpus.meta for corpus in batches.corpora]
    return sum(meta["n_bytes"] for meta in metas) / sum(meta["n_tokens"] for meta in metas) or None


def _due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


def _utilisation_per_rate(config: Config) -> float | None:
    """Share of the devices' peak that one token per second makes up: three times the forward pass's FLOPs. None where no
    peak is known."""
    peak = peak_flops(jax.devices()[0].device_kind, config.model.dtype)
    per_token = 3 * costs(config.model, config.sequence_length).flops_per_token
    return per_token / (peak * jax.device_count()) if peak else None
