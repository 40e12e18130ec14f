"""One run in several processes, on JAX's distributed runtime: joined by flags or through a launcher that JAX detects.

Every process runs the same command. Process 0 writes all files and prints; the others compute and print nothing. A
single process does not import JAX here.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from xfresearch.runtime import crash_log
from xfresearch.runtime.errors import DIVERGED, MISTAKE, TRANSIENT, Diverged, Stopped, UserError, exit_code

SHUTDOWN_SECONDS = 3600  # how long a process waits at the end for process 0, which writes the report
DETECTION_SECONDS = 10  # after the heartbeat timeout: the time the runtime takes to end a process that has lost another
ERROR_SECONDS = 3  # process 0, the coordinator, outlives an error that all processes share by this long
# Errors of a failed collective (Gloo on CPU, NCCL on GPU), as when another process is lost.
COLLECTIVE = re.compile(r"(?i:Gloo|NCCL|All(Gather|Reduce)|coordination)")
# Errors of a collective, or of the runtime's other calls when another process is lost. An unreachable file system may
# raise the latter too.
RUNTIME = r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|heartbeat|[Cc]onnection|Socket closed|[Bb]arrier"
LOST = re.compile(f"{COLLECTIVE.pattern}|{RUNTIME}")

_HANDLERS = ctypes.pythonapi  # Python's `signal` can neither read nor restore a handler that was set in C
_jax_handler = None  # JAX's SIGTERM handler, which passes a preemption notice to all processes
_job = None  # the Job of this process; None in a single process


class Job:
    """This process as one of several."""

    def __init__(self, index: int, count: int, heartbeat: int, workdir: str, monitor: subprocess.Popen):
        self.index = index
        self.count = count
        self.heartbeat = heartbeat
        self.workdir = workdir
        self.monitor = monitor

    @property
    def log(self) -> str:
        return f"{self.workdir}/{crash_log.log_name(self.index)}"


def add_flags(parser) -> None:
    """Adds the flags of every command that can run in several processes."""
    flags = parser.add_argument_group(
        "several processes", "run the same command in each process; no flags are needed if JAX detects the launcher"
    )
    flags.add_argument("--coordinator", metavar="HOST:PORT", help="address at which process 0 listens for the others")
    flags.add_argument("--processes", type=int, metavar="N", help="number of processes")
    flags.add_argument("--process", type=int, metavar="I", help="index of this process, from 0")
    flags.add_argument(
        "--distributed",
        choices=("auto", "off"),
        default="auto",
        help="auto (default): join the processes of a Cloud TPU, GKE, Slurm or Open MPI job; off: a single process",
    )
    flags.add_argument(
        "--join-timeout",
        type=int,
        default=300,
        metavar="SECONDS",
        help="how long to wait for the others at the start (default: 300)",
    )
    flags.add_argument(
        "--heartbeat",
        type=int,
        default=60,
        metavar="SECONDS",
        help="silence after which a process counts as lost (default: 60)",
    )


def check(options) -> bool:
    """Whether the flags name the processes. Raises UserError if only some flags are given or a value is wrong."""
    given = {f"--{name}": getattr(options, name) for name in ("coordinator", "processes", "process")}
    missing = [name for name, value in given.items() if value is None]
    if options.heartbeat < 5:
        raise UserError(f"--heartbeat={options.heartbeat} is not allowed: it must be at least 5 seconds")
    if options.join_timeout < 1:
        raise UserError(f"--join-timeout={options.join_timeout} is not allowed: it must be at least 1 second")
    if len(missing) == len(given):
        return False
    if missing:
        raise UserError(f"{missing[0]} is missing: {', '.join(given)} must be given together")
    if options.distributed == "off":
        raise UserError(f"--distributed=off is not allowed with --coordinator={options.coordinator}")
    host, _, port = options.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator={options.coordinator} is not allowed: it must be HOST:PORT")
    if options.processes < 1:
        raise UserError(f"--processes={options.processes} is not allowed: it must be at least 1")
    if not 0 <= options.process < options.processes:
        allowed = f"it must be from 0 to {options.processes - 1}, because --processes={options.processes}"
        raise UserError(f"--process={options.process} is not allowed: {allowed}")
    return True


@contextmanager
def joined(options, workdir: str):
    """Joins the other processes for the length of a `with` block; does nothing for a single process.

    Inside the block, every line on standard error has the process number in front. If the process crashes, its last
    lines go to `workdir`/errors/. Raises UserError if the flags do not fit together or the other processes cannot be
    reached.
    """
    global _job
    named = check(options)
    if options.distributed == "off" or not _initialize(options, named):
        yield
        return
    import jax
    from jax._src.distributed import global_state  # the public functions would start the devices

    index, count = global_state.process_id, global_state.num_processes
    if count > 1:
        _job = Job(index, count, options.heartbeat, workdir, crash_log.start_monitor(index, count, workdir))
    yield
    jax.distributed.shutdown()  # waits for the other processes
    if _job:
        crash_log.send_end()
        _job = None


def _initialize(options, named: bool) -> bool:
    """Starts JAX's distributed runtime. Returns False at once if no flags are given and JAX detects no launcher."""
    import jax

    flags = {}
    if named:
        if options.process == 0:
            _require_port(options.coordinator)
        names = {"coordinator_address": "coordinator", "num_processes": "processes", "process_id": "process"}
        flags = {name: getattr(options, flag) for name, flag in names.items()}
        flags["cluster_detection_method"] = "deactivate"
    timeouts = {"heartbeat_timeout_seconds": options.heartbeat, "shutdown_timeout_seconds": SHUTDOWN_SECONDS}
    # JAX would abort from C++ and print pages.
    timeouts["initialization_timeout"] = options.join_timeout + DETECTION_SECONDS
    watchdog = threading.Timer(options.join_timeout, _stop_waiting, [options])
    watchdog.daemon = True
    watchdog.start()
    try:
        with warnings.catch_warnings():
            if "JOB_COMPLETION_INDEX" not in os.environ:  # a pod outside an indexed job needs no Kubernetes package
                warnings.simplefilter("ignore")
            jax.distributed.initialize(**flags, **timeouts)
    except ValueError as error:
        if not named and "coordinator_address" in str(error):
            return False
        raise
    except RuntimeError as error:
        if not named and "must be called before" in str(error):  # a library user's process, where JAX already runs
            return False
        where = options.coordinator or "the coordinator that the launcher names"
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the other processes were not reached at --coordinator={where}: {reason}") from error
    finally:
        watchdog.cancel()
    _restore_sigterm()
    return True


def _stop_waiting(options) -> None:
    where = f" at --coordinator={options.coordinator}" if options.coordinator else ""
    line = f"stopped: not all processes came{where} within --join-timeout={options.join_timeout} seconds\n"
    os.write(2, line.encode())
    os._exit(TRANSIENT)


def _require_port(coordinator: str) -> None:
    """Raises UserError if this process cannot listen at the coordinator's port, which may crash JAX's service."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a socket of an earlier run may still be closing
        try:
            probe.bind(("", int(coordinator.rpartition(":")[2])))
        except OSError as error:
            raise UserError(
                f"--coordinator={coordinator}: process 0 cannot listen at that port: {error.strerror}"
            ) from error


def _restore_sigterm() -> None:
    """Restores the default action of SIGTERM and keeps JAX's handler for later.

    JAX's handler only records the signal. Outside the training loop nothing reads that record, so SIGTERM would do
    nothing.
    """
    global _jax_handler
    _HANDLERS.PyOS_getsig.restype = ctypes.c_void_p
    _jax_handler = _HANDLERS.PyOS_getsig(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def handle_preemption(enabled: bool) -> None:
    """Whether SIGTERM is a preemption notice to all processes, for the training loop, or ends this process."""
    if is_active():
        _HANDLERS.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(_jax_handler if enabled else None))  # None is SIG_DFL


def is_active() -> bool:
    """Whether this process is one of several."""
    return _job is not None


def first() -> bool:
    """Whether this is the process that writes and prints: process 0, or the only one."""
    return _job is None or _job.index == 0


def run_on_first(action: Callable, what: str):
    """Runs action() in process 0 while the others wait. Returns its result there, None elsewhere.

    Every process raises an error of `action`: UserError and Stopped as they are, any other error as Stopped.
    """
    if not is_active():
        return action()
    result = None
    error = None
    if first():
        try:
            result = action()
        except Exception as caught:
            error = caught
    kind, text = _broadcast(_described(error, what))
    if error:
        raise error
    if kind:
        raise {"UserError": UserError, "Stopped": Stopped, "Diverged": Diverged}[kind](text)
    return result


def _described(error: Exception | None, what: str) -> tuple[str, str]:
    if error is None:
        return "", ""
    kind = {MISTAKE: "UserError", DIVERGED: "Diverged"}.get(exit_code(error), "Stopped")
    if isinstance(error, UserError | Stopped):
        return kind, str(error)
    return kind, f"process 0 failed ({what}): {type(error).__name__}: {error}"


def _broadcast(strings: tuple[str, str], size: int = 4096) -> tuple[str, str]:
    """The two strings of process 0, in every process."""
    import numpy as np
    from jax.experimental import multihost_utils

    text = "\0".join(strings).encode()[:size]
    sent = np.frombuffer(text.ljust(size, b"\0"), np.uint8)
    received = bytes(multihost_utils.broadcast_one_to_all(sent).astype(np.uint8)).rstrip(b"\0")
    kind, _, rest = received.decode("utf8", "ignore").partition("\0")
    return kind, rest


def shared(value: Any, source: int | None = None) -> Any:
    """The `value` of the first process, or of the one with JAX's index `source`, in every process. JSON must be able to
    write it."""
    if not is_active():
        return value
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    own = first() if source is None else jax.process_index() == source
    sent = np.frombuffer(json.dumps(value).encode() if own else b"", np.uint8)
    size = int(broadcast_one_to_all(np.int32(len(sent)), own))
    received = broadcast_one_to_all(np.resize(sent, size) if own else np.zeros(size, np.uint8), own)
    return json.loads(received.astype(np.uint8).tobytes())


def gathered(numbers: list[int]) -> list[list[int]]:
    """The `numbers` of every process, in the order of JAX's indices. All processes give equally many."""
    if not is_active():
        return [numbers]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(np.array(numbers, np.int32)).tolist()


def first_message(text: str, size: int = 512) -> str:
    """The first `text` that is not empty, in the order of the processes, with its process number; the same in all."""
    if not is_active():
        return text
    import numpy as np
    from jax.experimental import multihost_utils

    sent = np.frombuffer(text.encode()[:size].ljust(size, b"\0"), np.uint8)
    texts = [bytes(row).rstrip(b"\0").decode("utf8", "ignore") for row in multihost_utils.process_allgather(sent)]
    return next((f"{message} (in process {index})" for index, message in enumerate(texts) if message), "")


def wait_for_all(name: str) -> None:
    """Returns when every process has called this."""
    if is_active():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def log_error(error: Exception) -> str:
    """Writes the stack trace of an error to this process's log and returns the path of the log.

    If the error looks like the loss of another process, waits until JAX's runtime has found out which one. The runtime
    then ends this process, and crash_log.py prints the reason.
    """
    assert _job, "a job of several processes"
    for line in traceback.format_exception(error):
        crash_log.write_log_only(line)
    if LOST.search(str(error)):
        time.sleep(_job.heartbeat + DETECTION_SECONDS)
    return _job.log


def exit_now(code: int):
    """Ends this process at once. A failed process must not wait for the others, which may never arrive."""
    assert _job, "a job of several processes"
    if _job.index == 0:
        time.sleep(ERROR_SECONDS)  # the others end with process 0: let them print their own reason first
    crash_log.send_end(keep_log=code not in (0, MISTAKE))
    os._exit(code)
