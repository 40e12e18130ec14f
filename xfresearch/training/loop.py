"""The training loop: batches -> step -> metrics, with evaluation, checkpoints and exact resume.

    state = newest good checkpoint, or a fresh state
    for step, batch in batches from state.step on:
        state, metrics = train_step(state, batch)          # returns at once; the device computes asynchronously
        place the next batches                             # another thread has read them
        report the metrics of the step before              # so that the device never waits for the host
        evaluate and save if they are due                  # after a notice to stop: save, and leave evaluation to a resume
                                                           # a state that is not good ends the run, and is not saved

The batch and all random numbers of a step are functions of (seed, step) alone: a resumed run continues bit for bit.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from xfresearch.checkpoints import manifest, store
from xfresearch.checkpoints.validity import is_finite
from xfresearch.data.cache import enable_compilation_cache
from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import predicts_next
from xfresearch.data.pipeline import Batches, Split, evaluation_batches, prepare
from xfresearch.evaluation.losses import summary, sums_of_batches
from xfresearch.run_config.config import Config
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import Diverged, require
from xfresearch.runtime.progress import stage
from xfresearch.sharding.first_execution import alone_at_first
from xfresearch.sharding.mesh import make_mesh
from xfresearch.sharding.partition import batch_sharding
from xfresearch.sharding.placing import local_rows, place, replicated, round_up
from xfresearch.training import outline, trackers
from xfresearch.training.beginning import begin
from xfresearch.training.callbacks import Callback, Callbacks, Start
from xfresearch.training.console import Console
from xfresearch.training.feed import Feed
from xfresearch.training.fitting import advising, fitting, fitting_program
from xfresearch.training.fork import say_changes
from xfresearch.training.kernel_choices import kernel_choices
from xfresearch.training.metrics import Clock, MetricsLog, Silent, bits_per_byte, plain
from xfresearch.training.monitoring import Health, HostTimes, Profile, utilisation_per_rate
from xfresearch.training.schedule import comparable, due, sequences, text
from xfresearch.training.stopping import Interrupted, PreemptionNotice, StopSignal, until
from xfresearch.training.workdir import restore_clock, saved_config, write_beginning

PANEL_ROWS = 8  # held-out rows of config.log.panel
MEASUREMENTS = ("evaluation", "panel")  # kinds of rows of metrics.jsonl


class Result(NamedTuple):
    step: int
    evaluation: dict  # loss, accuracy, ... of the last evaluation; {} without one
    clock: Clock
    params: dict  # for evaluation: averaged weights if the run keeps them
    stopped_by: str  # the signal or the callback that ended the run, or ''; it may have come with the last update
    finished: bool  # no update is left, and no measurement
    held_out: Callable[[int], dict]  # Trainer.held_out_sums with the last parameters
    manifest: dict[str, str]  # of data, code and settings (checkpoints/manifest.py)


def setup_jax(config: Config) -> None:
    """Process-wide settings of JAX: 64-bit numbers if the config needs them, and the compilation cache on disk."""
    jax.config.update("jax_enable_x64", config.model.param_dtype == "float64")
    enable_compilation_cache(config.data)


class Trainer:
    """All objects of one training process. All are built before the first step, so that mistakes show early."""

    def __init__(self, config: Config, workdir, tokenizer, clock: Clock, fork: bool, make_panel, callbacks, config_files):
        self.config = config
        self.workdir = epath.Path(workdir)
        self.clock = clock
        self.callbacks = Callbacks(callbacks)
        self.mesh = make_mesh(config)
        kernels = kernel_choices(config, self.mesh)
        self.program = fitting_program(config, self.mesh)
        self.batch_sharding = batch_sharding(self.mesh)
        with self.clock.measure("data"):
            self.batches = Batches(config, tokenizer=tokenizer)
            evaluated = config.evaluation.split if config.evaluation.every else None
            self.heldout = prepare(config, evaluated, tokenizer=tokenizer) if evaluated else None
        self.panel = self._panel(make_panel) if config.log.panel else None
        distributed.handle_preemption(True)  # before compilation, so that a notice during it is not lost
        self.callbacks.outline(outline.of_run(config, self.workdir, self.batches.corpora, self.heldout, self.mesh, kernels))
        self.manifest = manifest.make(self.batches, self.heldout, tokenizer, config_files)
        manifest.require_same_everywhere(self.manifest)
        self.bytes_per_token = self.batches.bytes_per_token()
        counts_bytes = tokenizer and predicts_next(config.data)
        self.byte_lengths = replicated(self.mesh, tokenizer.byte_lengths) if counts_bytes else None
        self.utilisation_per_rate = utilisation_per_rate(config)
        self.rows = self._local_rows(config.batch_size)
        with self.clock.measure("compile"), stage("making the state of the run"):
            self.state, meta, self.origin, self.emergency = begin(config, self.workdir, self.program)
        self.start, self.restored = int(jax.block_until_ready(self.state)["step"]), bool(meta)
        if meta and fork and distributed.first():
            say_changes(saved_config(workdir), config, self.start)
        if meta and not fork:
            now = self.manifest | self.batches.read_before(self.start)
            manifest.require_same(workdir, self.start, meta.get("manifest", {}), now)
        restore_clock(self.clock, self.workdir, meta)
        self.health = Health(config.training, meta.get("skipped", []))
        self._restore_evaluations(meta)
        self.done = self.start  # the last update
        again = MEASUREMENTS if self.unmeasured else ()
        self.log = MetricsLog(workdir, self.start if meta else -1, again) if distributed.first() else Silent()
        self.profile = Profile(workdir, config.log) if distributed.first() else None
        self.host_times = HostTimes(self.mesh) if distributed.is_active() else None
        self.evaluate_batch = alone_at_first(self.program.evaluate)

    def _panel(self, make_panel: Callable) -> Callable:
        """The panel on held-out rows, which every process reads."""
        every = self.config.evaluation.every
        require(self.heldout is not None, "evaluation.every", every, "at least 1 with log.panel: it uses held-out rows")
        batch = next(evaluation_batches(self.held_out, PANEL_ROWS, PANEL_ROWS))
        rows = {name: values[: len(self.held_out)] for name, values in batch.items()}
        return make_panel(self.config.model, rows, self.mesh)

    def write_beginning(self, tokenizer) -> None:
        """Writes config and origin, after compilation: a config with a mistake must not become that of the directory."""
        write_beginning(self.workdir, self.config, tokenizer, self.origin)

    @property
    def held_out(self) -> Split:
        """The held-out split, for what needs evaluation.every above 0."""
        assert self.heldout is not None, "evaluation.every=0"
        return self.heldout

    def _restore_evaluations(self, meta: dict) -> None:
        """Takes what the checkpoint of `meta` knows of evaluations, except what they have measured on another text."""
        self.best_text = text(self.config, 0, self.heldout) or meta.get("best_text", "")  # that of all losses compared
        self.best = meta.get("best", {}) if meta.get("best_text") == self.best_text else {}
        self.checkpoints = store.Checkpoints(self.workdir, self.config.checkpoint, self.best_text)
        self.last_evaluation, self.evaluated = meta.get("evaluation", {}), meta.get("evaluated", -1)  # and its update
        self.evaluated_text = meta.get("evaluated_text", "")
        measured = self.evaluated == self.start and is_finite(self.last_evaluation.get("loss"))
        self.checkpoints.kept.proven = self.start if measured else self.start - 1
        if self.evaluated_text != text(self.config, self.evaluated, self.heldout):
            self.last_evaluation, self.evaluated = {}, -1
        self.unmeasured = meta.get("unmeasured", False)  # a notice to stop left out what is due after the update
        if self.start == self.config.steps and self.config.evaluation.every:  # a fork may end at one without evaluation
            self.unmeasured |= self.evaluated != self.start

    def _local_rows(self, batch_size: int) -> np.ndarray:
        """The rows of a batch that this process reads."""
        return local_rows(self.batch_sharding, (batch_size, self.config.sequence_length))

    def place(self, batch: dict) -> dict:
        """A training batch as global arrays on the mesh, from the rows that this process has read."""
        return place(self.batch_sharding, (self.config.batch_size, self.config.sequence_length), self.rows, batch)

    def update(self, step_function, step: int, batch: dict, waited: float) -> tuple:
        """Dispatches update number `step`. Returns its metrics and, now and then, the gathered host times or None."""
        if self.profile:
            self.profile.before(step)
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            self.state, metrics = step_function(self.state, batch)
        gathered = None
        if self.host_times and step > self.start + 1:  # the first update is awaited: its time is that of the devices
            self.host_times.count(time.perf_counter() - began, waited)
            gathered = self.host_times.gather() if self.host_times.due(step, self.config.log.every) else None
        for value in jax.tree.leaves((metrics, gathered)):
            value.copy_to_host_async()  # when it is computed, so that `report` only picks it up
        if self.profile:
            self.profile.after(step, metrics)
        return metrics, gathered

    @property
    def params(self) -> dict:
        return self.state.get("ema", self.state["params"])

    def report(self, step: int, metrics: dict, host_times=None) -> None:
        """Logs the metrics of an update, for which it waits. Raises Diverged if the run fails with it."""
        layers = {name: values for name, values in metrics.items() if isinstance(values, dict)}
        values = {name: float(value) for name, value in jax.block_until_ready(metrics).items() if name not in layers}
        finite, tokens = bool(values.pop("finite")), int(values.pop("tokens"))
        self.clock.count(tokens)
        if self.bytes_per_token:
            values["bits_per_byte"] = bits_per_byte(values["loss"], self.bytes_per_token)
        values |= {"seconds": self.clock.training_seconds(), "tokens_per_second": self.clock.rate()}
        if self.utilisation_per_rate:
            values["model_flops_utilisation"] = self.utilisation_per_rate * values["tokens_per_second"]
        if finite:
            self.checkpoints.prove(step - 1)
        if reason := self.health.failure(step, finite, step == self.config.steps):
            raise self.diverged(reason)
        if self.config.training.on_nonfinite == "stop":
            values.pop("skipped")
        self.callbacks.call("on_step", step, values | {"tokens": tokens})
        spread = self.host_times.spread(host_times) if self.host_times and host_times is not None else None
        if step % self.config.log.every == 0 or step == self.config.steps:
            by_layer = {k: {n: a.tolist() for n, a in v.items()} for k, v in jax.device_get(layers).items()}
            self.write(step, "train", values | ({"host_seconds": spread} if spread else {}) | by_layer)

    def write(self, step: int, kind: str, values: dict) -> None:
        """Writes a row of metrics.jsonl, and shows it to the callbacks."""
        self.log.write(step, kind, values)
        self.callbacks.call("on_row", step, kind, plain(values))

    def diverged(self, reason: str) -> Diverged:
        """The error of a run that fails. Rejects the checkpoints of states that are not known to be good. All processes call
        this."""
        self.checkpoints.reject_unproven(reason)
        self.emergency.clear()
        steps = store.agreed_steps(self.workdir)
        good = f"the last good checkpoint is step {steps[-1]}" if steps else "there is no good checkpoint"
        return Diverged(f"{reason}; {good}")

    def held_out_sums(self, limit: int, stopping=None) -> dict:
        """Sums over each of `limit` held-out sequences, which are spread over the split (0: all), with these parameters.
        Raises Interrupted at a notice to stop."""
        size = round_up(self.mesh, self.config.evaluation.batch_size or self.config.batch_size)
        rows = self._local_rows(size)
        shape = (size, self.config.sequence_length)
        batches = until(stopping, evaluation_batches(self.held_out, size, limit, rows))
        placed = (place(self.batch_sharding, shape, rows, batch) for batch in batches)
        sums = sums_of_batches(self.evaluate_batch, self.params, placed, self.byte_lengths)
        if self.byte_lengths is None or isinstance(self.held_out, LabelledSplit):
            return sums
        return sums | {"bytes": sums["bytes"] * self.held_out.byte_scale}

    def measure(self, step: int, stopping) -> float | None:
        """Logs what is due after update `step`: held-out metrics, and the panel's figures. Returns the held-out loss, if
        that was due and is of the same text as at other updates. At a notice to stop it sets `unmeasured`, and leaves all
        of it to the run that resumes. Raises Diverged if the loss is not finite."""
        evaluating, looking = due(self.config, step)
        try:
            loss = self.evaluate(step, stopping)["loss"] if evaluating else None
        except Interrupted:
            self.unmeasured = True
            return None
        if looking:
            self.look_inside(step)
        self.unmeasured = False
        return loss if evaluating and comparable(self.config, step, len(self.held_out)) else None

    def evaluate(self, step: int, stopping) -> dict:
        """Measures and logs the held-out metrics with the current parameters. Raises Interrupted at a notice to stop."""
        with self.clock.measure("evaluation"):
            limit = sequences(self.config, step, len(self.held_out))
            values = summary(self.held_out_sums(limit, stopping), self.held_out.meta)
        self.write(step, "evaluation", values)
        if not is_finite(values["loss"]):
            raise self.diverged(f"the held-out loss after update {step} is not finite")
        self.checkpoints.prove(step)
        self.last_evaluation, self.evaluated, self.evaluated_text = values, step, text(self.config, step, self.held_out)
        same_text = comparable(self.config, step, len(self.held_out))
        if same_text and values["loss"] < self.best.get("best_loss", math.inf):
            self.best = {"best_loss": values["loss"], "best_step": step}
        self.callbacks.call("on_evaluation", step, values | self.best)
        return values

    def look_inside(self, step: int) -> None:
        """Logs the panel's figures of the current parameters."""
        with self.clock.measure("evaluation"):
            assert self.panel, "log.panel=0"
            self.write(step, "panel", self.panel(self.params))

    @property
    def finished(self) -> bool:
        """Whether no update is left, and no measurement."""
        return self.done == self.config.steps and not self.unmeasured

    def result(self, stopped_by: str) -> Result:
        """The result of a run that ends after the update `done`."""
        end = (self.last_evaluation, self.clock, self.params, stopped_by, self.finished)
        return Result(self.done, *end, self.held_out_sums, self.manifest)

    def save(self, step: int, loss: float | None, in_memory: bool = False) -> None:
        """Saves the state after update `step`, as an emergency checkpoint if `in_memory`. Raises Diverged if the state is
        not good. The last state must also be known to be good (Checkpoints.prove)."""
        if step == self.config.steps and self.checkpoints.kept.proven < step - 1:
            raise self.diverged(f"update {step}, the last, was skipped, and no held-out loss shows that the state is good")
        with self.clock.measure("checkpoint"):
            self.log.sync()
            meta = {"clock": self.clock.state(), "saved_at": time.time(), "evaluation": self.last_evaluation}
            meta |= {"manifest": self.manifest | self.batches.read_before(step), "skipped": self.health.skipped}
            meta |= {"best": self.best, "best_text": self.best_text, "evaluated_text": self.evaluated_text}
            meta |= {"unmeasured": self.unmeasured, "evaluated": self.evaluated}
            if in_memory:
                reason = self.emergency.save(step, self.state, meta)
            else:
                reason = self.checkpoints.save(step, self.state, meta, loss)
        if reason:
            raise self.diverged(f"after update {step}, {reason}")
        if not in_memory:
            self.callbacks.call("on_checkpoint", step, str(store.folder_of(self.workdir, step)))


def train(
    config: Config,
    workdir,
    tokenizer,
    clock: Clock | None = None,
    fork: bool = False,
    panel: Callable | None = None,
    callbacks: Sequence[Callback] | None = None,
    config_files: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Trains to config.steps, from the newest checkpoint in `workdir`, from config.start.path or from new parameters.

    `tokenizer` is None for a data set with labels. `clock` may have counted time before this call. With `fork`, data, code
    and settings may differ from those of the checkpoint (checkpoints/manifest.py). `panel` is analysis.panel.Panel, which
    config.log.panel needs. `callbacks` are by default those of `default_callbacks`. `config_files` are the digests of the
    files that made the config (identity.config_files).
    On SIGTERM or SIGINT, to any of several processes, saves and returns early; an evaluation that was due then is made by
    the run that resumes. A callback that raises ends the run in the same way, and an error other than StopTraining is then
    raised. Raises Diverged if the loss is not finite or too many updates were skipped, Stopped if a checkpoint cannot be
    written, UserError if config and devices or data do not fit.
    """
    clock, outside = clock or Clock(), sys.exception()
    callbacks = default_callbacks(config) if callbacks is None else callbacks
    with clock.measure("start"), advising(config):
        run = Trainer(config, workdir, tokenizer, clock, fork, panel, callbacks, config_files)
        step_function = None
        if run.start < config.steps:
            with clock.measure("compile"), stage("compiling the update"):
                step_function = alone_at_first(fitting(run.program.compiled_update, config, run.mesh))
        run.write_beginning(tokenizer)
    if not step_function and not run.unmeasured:
        run.emergency.clear()
        distributed.handle_preemption(False)
        return run.result("")
    stopping = PreemptionNotice() if distributed.is_active() else StopSignal()
    batches = Feed(run.batches.iterate(run.start, config.steps, run.rows), run.place, config.data.prefetch)
    run.clock.begin()
    try:
        run.callbacks.start(Start(config, run.workdir, run.start, run.bytes_per_token))
        with advising(config):
            updates(run, step_function, batches, stopping)
        with run.clock.measure("checkpoint"):
            run.checkpoints.wait()
            run.emergency.clear()
    finally:
        run.clock.end()
        if run.profile:
            run.profile.close()
        run.callbacks.end(run.done, _reason(run, stopping, outside))
        run.log.close()
        batches.close()
        stopping.restore()
    run.checkpoints.close()
    stopped_by = distributed.shared(run.callbacks.reason or stopping.received)
    run.callbacks.raise_error()
    return run.result(stopped_by)


def default_callbacks(config: Config) -> list[Callback]:
    """The console, and the tracker of log.tracker. Raises UserError if the tracker's library is not installed."""
    return [Console(), *trackers.chosen(config)]


def _reason(run: Trainer, stopping, outside: BaseException | None) -> str:
    """Why the run ends before its last update: '' if it does not, or the error that ends it. The caller may be handling
    another one, `outside`."""
    if (error := sys.exception()) and error is not outside:
        return f"{type(error).__name__}: {error}"
    return "" if run.finished else run.callbacks.reason or stopping.received


def updates(run, step_function: Callable | None, batches: Feed, stopping) -> None:
    """Makes the updates and measurements that are left, until `stopping` or until a callback ends the run. run: a Trainer,
    or several of them (together.py)."""
    pending = None
    if run.panel and not run.start:
        run.look_inside(0)
    if run.unmeasured:
        run.checkpoints.add_loss(run.done, run.measure(run.done, stopping))
    for index, batch in () if run.unmeasured else batches:
        metrics = run.update(step_function, index + 1, batch, batches.wait_seconds)
        batches.place_ahead()
        if pending:
            run.report(*pending)
        run.done = done = index + 1
        pending = (done, *metrics)
        saving = run.checkpoints.due(done, run.config.steps)
        run.clock.set("input", batches.wait_seconds)
        stop = stopping.reached() or run.callbacks.stops
        if stop or saving or run.emergency.due(done) or any(due(run.config, done)):
            run.report(*pending)
            pending = None
        loss = run.measure(done, stopping)
        stop = stop or run.unmeasured or run.callbacks.stops
        if run.emergency.due(done, stop) and not saving:
            run.save(done, loss, in_memory=True)
        if saving or stop:
            run.save(done, loss)
        if stop or run.callbacks.stops:
            break
