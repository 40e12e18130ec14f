"""The state that a run begins with: that of its newest good checkpoint, or a fresh one."""

from functools import partial
from typing import NamedTuple

import jax
from etils import epath

from xfresearch.checkpoints import store
from xfresearch.checkpoints.newest import newest_good
from xfresearch.checkpoints.validity import rejection
from xfresearch.run.config import Config
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import move_damaged
from xfresearch.training import start
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program


class Beginning(NamedTuple):
    state: dict
    meta: dict  # of the checkpoint; {} for a run that begins
    lineage: list[dict]  # of a run that begins from a trained model


def begin(config: Config, workdir: epath.Path, program: Program) -> Beginning:
    """Every process calls this. Moves checkpoints that are newer than the good one away: the run makes them again. Raises
    UserError if there are checkpoints and none is good."""
    listed = partial(store.agreed_steps, workdir)
    restored = newest_good(listed, lambda step: store.restore(workdir, step, program.abstract_state))
    if restored is not None:
        step, (state, meta) = restored
        distributed.run_on_first(lambda: _move_newer(workdir, step), "moving checkpoints that are not good")
        return Beginning(_with_hyper(config, program, state), meta, [])
    if distributed.shared(store.present(workdir)):
        raise UserError(
            f"--workdir={workdir}: every checkpoint is damaged, unfinished or not good, or belongs to another "
            "model or optimizer: use a new directory"
        )
    if not config.start.path:
        return Beginning(program.jit_init(hyper_of(config)), {}, [])
    params, lineage = start.load(config, program.mesh)
    return Beginning(program.jit_start(params, hyper_of(config)), {}, lineage)


def _with_hyper(config: Config, program: Program, state: dict) -> dict:
    """A state with the numbers of this config: with --fork they may differ from those of the checkpoint."""
    return state | {"hyper": jax.device_put(hyper_of(config), program.shardings["hyper"])}


def _move_newer(workdir: epath.Path, step: int) -> None:
    for path in (store.folder_of(workdir, each) for each in store.present(workdir) if each > step):
        move_damaged(path, rejection(path))
