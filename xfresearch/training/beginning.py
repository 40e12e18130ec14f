"""The state that a run begins with: that of its newest good checkpoint, or a fresh one."""

import sys
from typing import NamedTuple

import jax
from etils import epath

from xfresearch.checkpoints import store
from xfresearch.checkpoints.emergency import Emergency, Without, of_run
from xfresearch.checkpoints.validity import Unusable, newest_good, rejection
from xfresearch.run_config.config import Config
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import move_damaged
from xfresearch.training import pretrained
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program
from xfresearch.training.workdir import NEW, Origin, record_resumed, starts


class Beginning(NamedTuple):
    state: dict
    meta: dict  # of the checkpoint; {} for a run that begins
    origin: Origin | None  # of a run that begins; None for one that resumes
    emergency: Emergency | Without  # the emergency checkpoints that the run makes


def begin(config: Config, workdir: epath.Path, program: Program) -> Beginning:
    """Restores or makes the state of a run. Checkpoints that are newer than the good one are moved away: the run makes them
    again. Every process calls this. Raises UserError if there are checkpoints and none is good."""
    past = starts(workdir)
    emergency = of_run(workdir, config.checkpoint, program.mesh, past[0]["seconds"] if past else 0.0)
    source = _Source(workdir, program, emergency)
    restored = newest_good(source.steps, source.read)
    emergency.begin(restored[0] if restored else 0)
    if restored is not None:
        step, (state, meta) = restored
        distributed.run_on_first(lambda: _move_newer(workdir, step), "moving checkpoints that are not good")
        if config.checkpoint.emergency:
            distributed.run_on_first(lambda: record_resumed(workdir, source.used), "recording the checkpoint")
        return Beginning(_with_hyper(config, program, state), meta, None, emergency)
    if distributed.shared(store.present(workdir)):
        raise UserError(
            f"--workdir={workdir}: every checkpoint is damaged, unfinished or not good, or belongs to another "
            "model or optimizer: use a new directory"
        )
    if not config.start.path:
        return Beginning(program.jit_init(hyper_of(config)), {}, NEW, emergency)
    params, origin = pretrained.load(config, program.mesh)
    return Beginning(program.jit_start(params, hyper_of(config)), {}, origin, emergency)


class _Source:
    """The checkpoints in the run's directory, and the emergency checkpoints. If a step has both, the emergency checkpoint is
    read, which is faster."""

    def __init__(self, workdir: epath.Path, program: Program, emergency: Emergency | Without):
        self.workdir, self.target, self.emergency = workdir, program.abstract_state, emergency
        self.used = ""  # the checkpoint that was read, in words
        self.saved: list[int] = []
        self.held: list[int] = []

    def steps(self) -> list[int]:
        self.saved = store.agreed_steps(self.workdir)
        self.held = self.emergency.steps()
        return sorted({*self.saved, *self.held})

    def read(self, step: int) -> tuple[dict, dict]:
        if isinstance(self.emergency, Emergency) and step in self.held:
            try:
                read = self.emergency.restore(step, self.target)
                processes = self.emergency.read_from(step)
                self.used = f"step {step}, an emergency checkpoint of process {', '.join(map(str, processes))}"
                return read
            except Unusable as error:
                if step not in self.saved:
                    raise
                print(f"warning: {error}; reading the one in {self.workdir}", file=sys.stderr)
        self.used = f"step {step}, a checkpoint in {self.workdir}"
        return store.restore(self.workdir, step, self.target)


def _with_hyper(config: Config, program: Program, state: dict) -> dict:
    """A state with the numbers of this config: with --fork they may differ from those of the checkpoint."""
    return state | {"hyper": jax.device_put(hyper_of(config), program.shardings["hyper"])}


def _move_newer(workdir: epath.Path, step: int) -> None:
    for path in (store.folder_of(workdir, each) for each in store.present(workdir) if each > step):
        move_damaged(path, rejection(path))
