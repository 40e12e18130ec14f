"""What is watched while a run trains: whether it still learns, profiles of a few updates, host times of all processes, and
the FLOPs utilisation."""

import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xfresearch.options.run_options import LogConfig, TrainingConfig
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.runtime.files import in_bucket, inside
from xfresearch.runtime.hardware import peak_flops

POLL_SECONDS = 10  # between two checks for a profile request: a bucket is slow to query
GATHER_STEPS = 20  # least number of updates between two gathers of the host times
WINDOW = 100  # updates, of which some may be skipped


class Health:
    """Decides after each update whether the run goes on: it fails if its loss or gradient is not finite, or if too many
    updates were skipped. `skipped` are the numbers of the updates that earlier processes of the run have skipped, at least
    those of the last WINDOW."""

    def __init__(self, config: TrainingConfig, skipped: list[int]):
        self.config = config
        self.skipped = list(skipped)

    def failure(self, step: int, finite: bool, last: bool) -> str:
        """Why the run fails after update `step`, the `last` one or not; '' if it goes on."""
        if self.config.on_nonfinite == "stop":
            return "" if finite else f"the loss or gradient of step {step} (batch {step - 1}) is not finite"
        if not finite:
            self.skipped.append(step)
        self.skipped = [each for each in self.skipped if each > step - WINDOW]
        window = min(WINDOW, step) if last else WINDOW
        if len(self.skipped) <= self.config.skip_limit * window:
            return ""
        counted = f"{len(self.skipped)} of the {min(WINDOW, step)} updates up to step {step} were skipped"
        return f"{counted}, more than training.skip_limit={self.config.skip_limit:g} allows"


class Profile:
    """Traces `log.profile_steps` updates with jax.profiler into `workdir`/profile, for XProf and TensorBoard.

    The trace starts at update `log.profile_start`, or when the file `workdir`/profile.request is created or touched.
    """

    def __init__(self, workdir, config: LogConfig):
        self.directory = inside(workdir, "profile")
        self.request = epath.Path(workdir) / "profile.request"
        self.config = config
        self._handled = self._request_time()
        self._polled = time.monotonic()
        self._last: int | None = None  # the last update of the current trace
        self._trace_directory = ""

    def before(self, step: int) -> None:
        """Call this before update number `step` is dispatched. Starts a trace if one is due."""
        if self._last is None and (step == self.config.profile_start or self._new_request()):
            self._last = step + self.config.profile_steps - 1
            remote = in_bucket(self.directory)
            self._trace_directory = tempfile.mkdtemp() if remote else str(self.directory)
            jax.profiler.start_trace(self._trace_directory)

    def after(self, step: int, results) -> None:
        """Call this after update `step` is dispatched. The end of the trace waits for its `results`."""
        if self._last is not None and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends the current trace, if there is one."""
        if self._last is None:
            return
        jax.profiler.stop_trace()
        self._last = None
        if self._trace_directory != str(self.directory):
            _copy(Path(self._trace_directory), self.directory)
            shutil.rmtree(self._trace_directory)

    def _new_request(self) -> bool:
        """Whether there is a request that has not been handled. Looks at most every POLL_SECONDS."""
        if time.monotonic() - self._polled < POLL_SECONDS:
            return False
        self._polled = time.monotonic()
        before, requested = self._handled, self._request_time()
        self._handled = requested or before  # a request that is removed is none
        return self._handled != before  # the file may be older than the last request: the clock was set back

    def _request_time(self) -> float:
        """Modification time of the request file; 0 if there is none."""
        return self.request.stat().mtime if self.request.exists() else 0.0


def _copy(source: Path, target: epath.Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())  # epath's copy to a bucket does not read local files


class HostTimes:
    """Host seconds per update of each process: waiting for input and dispatching updates to its devices.

    An update takes as long as the slowest process, in every process. Only the host time tells the processes apart. A
    small program gathers the times after an update. They are read together with the metrics of that update.
    """

    def __init__(self, mesh: Mesh):
        self._processes = np.array([device.process_index for device in mesh.devices.flat])
        self._by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0

    def count(self, dispatch_seconds: float, wait_seconds: float) -> None:
        """Counts one update. `wait_seconds` is the total time that this process has waited for input so far."""
        self._steps += 1
        self._seconds += dispatch_seconds + wait_seconds - self._waited
        self._waited = wait_seconds

    def due(self, step: int, every: int) -> bool:
        """Whether to gather the times after update `step`, of which every `every`-th is logged."""
        return step % every == 0 and self._steps >= GATHER_STEPS

    def gather(self) -> jax.Array:
        """Starts to gather the mean times since the last call: an array [devices], the same in every process."""
        own = np.full(1, self._seconds / self._steps, np.float32)
        self._steps = 0
        self._seconds = 0.0
        return self._gather(jax.make_array_from_callback(self._processes.shape, self._by_device, lambda _: own))

    def spread(self, gathered: jax.Array) -> dict[str, float]:
        """Smallest, median and largest time over the processes, and the process with the largest."""
        seconds = dict(zip(self._processes.tolist(), np.asarray(gathered).tolist(), strict=True))
        ranked = sorted(seconds.values())
        return {
            "min": ranked[0],
            "median": float(np.median(ranked)),
            "max": ranked[-1],
            "slowest_process": max(seconds, key=seconds.__getitem__),
        }


def utilisation_per_rate(config: Config) -> float | None:
    """Model FLOPs utilisation at one token per second: three times the FLOPs of the forward pass over the devices'
    peak. None if the peak is not known, or if parameters are frozen: their backward pass takes less."""
    if config.optimizer.trainable:
        return None
    peak = peak_flops(jax.devices()[0].device_kind, config.model.dtype)
    per_token = costs(config.model, config.sequence_length).training_flops_per_token
    return per_token / (peak * jax.device_count()) if peak else None
