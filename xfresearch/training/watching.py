"""Looking at a run while it trains: a profile of a few updates, and how the time of the processes' hosts spreads."""

import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xfresearch.checkpoints.store import in_bucket
from xfresearch.config.run import LogConfig

LOOK_SECONDS = 10  # between two looks for a request: a bucket is slow to ask
SPREAD_STEPS = 20  # updates at least between two gatherings of the hosts' times


class Profile:
    """Traces `log.profile_steps` updates with jax.profiler into `workdir`/profile, which XProf and TensorBoard read.

    They start with update `log.profile_start`, or whenever the file `workdir`/profile.request is made or touched.
    """

    def __init__(self, workdir, config: LogConfig):
        place = epath.Path(workdir)
        self.directory, self.request, self.config = place / "profile", place / "profile.request", config
        self._handled, self._looked = self._requested(), time.monotonic()
        self._last, self._written_to = None, None

    def before(self, step: int) -> None:
        """Update number `step` is about to be handed to the devices."""
        if self._last is None and (step == self.config.profile_start or self._asked()):
            self._last = step + self.config.profile_steps - 1
            remote = in_bucket(self.directory)
            self._written_to = tempfile.mkdtemp() if remote else str(self.directory)
            jax.profiler.start_trace(self._written_to)

    def after(self, step: int, results) -> None:
        """It has been, and gives `results`, for which the end of the window waits."""
        if self._last is not None and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        if self._last is None:
            return
        jax.profiler.stop_trace()
        self._last = None
        if self._written_to != str(self.directory):
            _copy(Path(self._written_to), self.directory)
            shutil.rmtree(self._written_to)

    def _asked(self) -> bool:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked, before = time.monotonic(), self._handled
        self._handled = self._requested()
        return self._handled != before

    def _requested(self) -> float:
        """When the request was made; 0 where there is none."""
        return self.request.stat().mtime if self.request.exists() else 0.0


def _copy(source: Path, target: epath.Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())  # a bucket's own copy knows no local files


class HostTimes:
    """The seconds per update that each process spends on its own: waiting for input and handing work to its devices.

    Updates themselves take as long as the slowest process, in all of them: only a process's own time tells them apart.
    The times are gathered by a small program that runs behind the update, and read when its metrics are.
    """

    def __init__(self, mesh: Mesh):
        self._processes = np.array([device.process_index for device in mesh.devices.flat])
        self._own = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0

    def count(self, dispatch_seconds: float, wait_seconds: float) -> None:
        """One update: how long it took to hand it over, and how long this process has waited for input in all."""
        self._steps += 1
        self._seconds += dispatch_seconds + wait_seconds - self._waited
        self._waited = wait_seconds

    def due(self, step: int, every: int) -> bool:
        return step % every == 0 and self._steps >= SPREAD_STEPS

    def gather(self) -> jax.Array:
        """Starts gathering the times since the last call; [devices], the same in every process."""
        own = np.full(1, self._seconds / self._steps, np.float32)
        self._steps, self._seconds = 0, 0.0
        return self._gather(jax.make_array_from_callback(self._processes.shape, self._own, lambda _: own))

    def spread(self, gathered: jax.Array) -> dict[str, float]:
        """Smallest, median and largest of the processes' times, and the process that has the largest."""
        seconds = dict(zip(self._processes.tolist(), np.asarray(gathered).tolist(), strict=True))
        ranked = sorted(seconds.values())
        return {
            "min": ranked[0],
            "median": float(np.median(ranked)),
            "max": ranked[-1],
            "slowest_process": max(seconds, key=seconds.get),
        }
