"""Emergency checkpoints: each process keeps the shards of its devices on its own machine, preferably in memory.

    <checkpoint.emergency>/<run>/process-<index>/<step>/    as in store.py, but with the shards of this process alone

The checkpoints of store.py are on a disk or in a bucket that all machines share, where a large model takes minutes to write.
Emergency checkpoints need no network, so they may be made often. When machines were lost and the run starts again, each
shard comes from the first replica (sharding/replicas.py) that still has it. Then all digests are compared, as for any
checkpoint.

Orbax writes and reads the arrays. Its own emergency.CheckpointManager (0.12.8, experimental) is not used: its first replica
keeps nothing in memory, one other replica must have all shards, it sends shards as sums of numbers, which turns -0.0 into
0.0, and it has no room for digests and a manifest.
"""

import hashlib
import re
import socket
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from xfresearch.checkpoints import store, writing
from xfresearch.checkpoints.digests import changed, digests
from xfresearch.checkpoints.validity import VALIDATED, is_published
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime import crash_log, distributed
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.files import (
    in_bucket,
    inside,
    is_directory,
    make_directory,
    names_in,
    read_object,
    remove_directory,
    remove_files,
    rename,
)
from xfresearch.sharding import replicas

WORTH = 64  # chips of a slice; with fewer, checkpoints to a bucket are fast enough
MOST = 4  # steps that a process reports to the others; it has at most three


def of_run(workdir, config: CheckpointConfig, mesh: Mesh, begun: float) -> "Emergency | Without":
    """The emergency checkpoints of the run in `workdir` that began at the time `begun`. Raises UserError if no other machine
    has the same shards, or if a directory cannot be written."""
    if not config.emergency:
        return Without()
    local = not in_bucket(config.emergency) and epath.Path(config.emergency).is_absolute()
    require(local, "checkpoint.emergency", config.emergency, "an absolute path, such as /dev/shm/xfresearch, or ''")
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    allowed = f"'' with {jax.process_count()} process(es) and mesh {sizes}: no other machine (with several slices: no other "
    allowed += "slice) has the same shards of the parameters; mesh.data makes replicas"
    machines = _machines() if distributed.is_active() else [0]
    failing = machines if len(set(machines)) > 1 else list(range(len(machines)))  # on one machine it is a rehearsal
    possible = len(machines) > 1 and replicas.is_replicated(mesh, failing)
    require(possible, "checkpoint.emergency", config.emergency, allowed)
    made = Emergency(workdir, config, mesh, distributed.shared(begun))
    problem = ""
    try:
        make_directory(made.root)
    except OSError as error:
        problem = error.strerror or str(error)
    problem = distributed.first_message(problem)
    require(not problem, "checkpoint.emergency", config.emergency, f"a directory that can be written ({problem})")
    own = machines[jax.process_index()]
    made.adopt({index for index, machine in enumerate(machines) if machine == own})
    crash_log.send_emergency(str(made.folder))
    if mesh.size < WORTH and distributed.first():
        few = f"{mesh.size} devices: emergency checkpoints are for slices of {WORTH} chips and more"
        print(f"config.checkpoint.emergency on {few}; here a smaller checkpoint.every may do", file=sys.stderr)
    return made


def _machines() -> list[int]:
    """The number of the machine of each process. All processes call this."""
    return [number for (number,) in distributed.gathered([zlib.crc32(socket.gethostname().encode()) >> 1])]


class Without:
    """A run that makes no emergency checkpoints."""

    def due(self, step: int, stop: bool = False) -> bool:
        return False

    def save(self, step: int, state: dict, meta: dict) -> str:
        raise NotImplementedError

    def steps(self) -> list[int]:
        return []

    def begin(self, step: int) -> None:
        pass

    def clear(self) -> None:
        pass


class Emergency:
    """The emergency checkpoints of a run. Every process has one, and calls its methods after the same updates."""

    def __init__(self, workdir, config: CheckpointConfig, mesh: Mesh, begun: float):
        self.every = config.emergency_every
        self.mesh = mesh
        processes = [device.process_index for device in mesh.devices.flat]
        self.run = {"begun": begun, "mesh": dict(mesh.shape), "processes": processes}  # checkpoints of others are not read
        path = epath.Path(workdir).expanduser().absolute()
        self.root = epath.Path(config.emergency) / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        self.folder = inside(self.root, f"process-{jax.process_index()}")
        self.shards = replicas.shards_of(mesh, jax.process_index())
        self.sources: dict[int, np.ndarray] = {}  # {step: the devices whose shards are read}
        self.writer = writing.shards_writer(store.ITEMS)
        self.writing = 0  # the step of the newest checkpoint whose writing has begun

    def adopt(self, here: set[int]) -> None:
        """Renames a directory that another process with the same shards has left on this machine, to be this process's:
        slices change places when a job starts again. Removes the directories of all other processes that are not `here`, on
        this machine. All processes call this."""
        before = [int(name[8:]) for name in names_in(self.root) if re.fullmatch("process-[0-9]{1,9}", name)]
        lost = [index for index in before if index not in here]
        for old in lost:
            if not is_directory(self.folder) and replicas.shards_of(self.mesh, old) == self.shards:
                with suppress(FileNotFoundError):  # another process of this machine was faster
                    rename(inside(self.root, f"process-{old}"), self.folder)
        distributed.wait_for_all("each process has its emergency checkpoints")
        for old in lost:
            remove_directory(self.root, f"process-{old}")
        make_directory(self.folder)

    def due(self, step: int, stop: bool = False) -> bool:
        """Whether to save after update `step`. At a notice to `stop` always: there may be no time for a whole checkpoint."""
        return stop or step % self.every == 0

    def save(self, step: int, state: dict, meta: dict) -> str:
        """Waits until the previous checkpoint is written, then starts writing `state`, and returns ''. A state that is not
        good is not written, and the reason is returned. A failed write is a warning."""
        self.wait()
        items = store.items_of(state)
        reason = store.fault_before_writing(step, items, meta)
        if reason:
            return reason
        meta = meta | {"step": step, VALIDATED: True, "run": self.run, "digests": digests(items)}
        meta = distributed.shared(store.with_digest(meta))
        # All processes are here, so all have written the previous checkpoint: no process needs an older one.
        self._keep(self._own()[-1:])
        self.writing = step
        with self._warning():
            writing.write_shards(self.writer, inside(self.folder, str(step)), items, meta)
        return ""

    def wait(self) -> None:
        """Returns when everything is written."""
        with self._warning():
            self.writer.wait_until_finished()

    def steps(self) -> list[int]:
        """The steps whose shards are all held by some process, ascending. All processes call this."""
        own = self._own()[-MOST:]
        told = distributed.gathered([*own, *[-1] * (MOST - len(own))])
        self.sources = {}
        for step in sorted({step for row in told for step in row if step >= 0}):
            chosen = replicas.sources(self.mesh, {index for index, row in enumerate(told) if step in row})
            if chosen is not None:
                self.sources[step] = chosen
        return list(self.sources)

    def read_from(self, step: int) -> list[int]:
        """The processes whose shards of one of `steps` are read."""
        return sorted({device.process_index for device in self.mesh.devices[self.sources[step]]})

    def restore(self, step: int, abstract_state: dict) -> tuple[dict, dict]:
        """The training state of one of `steps`, with the shardings of `abstract_state`, and the checkpoint's meta. Raises
        Corrupt in every process if the checkpoint is damaged."""
        readers, wanted = self.read_from(step), store.items_of(abstract_state)
        reads = jax.process_index() in readers
        arrays = wanted
        meta: dict = {}
        damage = ""
        try:
            if reads:
                arrays, meta = store.read_files(inside(self.folder, str(step)), wanted)
        except Exception as error:  # the type depends on where the file is truncated or altered
            damage = store.reason_of(error)
        _agree(step, damage)
        of_all = distributed.shared(meta, readers[0])
        _agree(step, "its metadata are those of another checkpoint" if reads and meta != of_all else "")
        arrays = replicas.sent(self.mesh, arrays if reads else replicas.zeros(wanted), self.sources[step])
        other = changed(of_all["digests"], arrays)
        _agree(step, f"{other} does not have the digest that was recorded with it" if other else "")
        return store.state_of(arrays, abstract_state), of_all

    def begin(self, step: int) -> None:
        """The run goes on from `step`. Removes the checkpoints of other steps: the run makes the later ones again."""
        self._keep([own for own in self._own() if own == step])

    def clear(self) -> None:
        """Removes all emergency checkpoints of the run. All processes call this."""
        self.wait()
        distributed.wait_for_all("emergency checkpoints are written")
        remove_directory(self.folder)
        remove_files(self.root, wrote=lambda name: False)  # if no process on this machine has any left

    def _own(self) -> list[int]:
        """The steps of this process's whole checkpoints, ascending."""
        return sorted(int(name) for name in names_in(self.folder) if store.is_step(name) and self._is_whole(name))

    def _is_whole(self, name: str) -> bool:
        """Whether the checkpoint of this name was written to its end, by this run on this mesh."""
        path = inside(self.folder, name)
        with suppress(OSError, UserError):
            return is_published(path) and read_object(inside(path, "meta", "metadata")).get("run") == self.run
        return False

    def _keep(self, steps: list[int]) -> None:
        """Removes everything in this process's directory except for these steps."""
        for name in set(names_in(self.folder)) - {str(step) for step in steps}:
            remove_directory(self.folder, name)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Turns any error in the block into a warning: Orbax raises errors of several types for a full disk."""
        try:
            yield
        except Exception as error:
            reason = store.reason_of(error)
            print(f"warning: the emergency checkpoint of step {self.writing} is not written: {reason}", file=sys.stderr)


def _agree(step: int, damage: str) -> None:
    store.agree(step, f"the emergency checkpoint: {damage}" if damage else "")
