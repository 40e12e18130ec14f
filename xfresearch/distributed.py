"""Many processes, one run: JAX's own runtime, joined by flags or through whatever launcher JAX detects.

Every process runs the same command. The first one (process 0) writes what a run writes; the others compute with it and
keep quiet. Nothing here starts JAX where a single process runs.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager

from xfresearch import last_words
from xfresearch.errors import Stopped, UserError

SHUTDOWN_SECONDS = 3600  # that a process waits for the first one's report at the end
FINDING_SECONDS = 10  # that the runtime takes, after the heartbeat, to end a process that has lost another
WORDS_SECONDS = 3  # that the first process, to which all are connected, outlives a mistake that is everyone's
# What the runtime says of a collective operation that failed (Gloo on CPU, NCCL on GPU), as it does when a process is gone.
COLLECTIVE = re.compile(r"(?i:Gloo|NCCL|All(Gather|Reduce)|coordination)")
# The same, and what its other calls say then. A file system that cannot be reached may say that too.
RUNTIME = r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|heartbeat|[Cc]onnection|Socket closed|[Bb]arrier"
LOST = re.compile(f"{COLLECTIVE.pattern}|{RUNTIME}")

_HANDLERS = ctypes.pythonapi  # Python's `signal` can neither see nor put back a handler that was set in C
_jax_handler = None  # the one that JAX sets for SIGTERM, which passes it on to all processes as a notice
_job = None  # the Job that this process belongs to, where there are several processes


class Job:
    """What this process is among its peers."""

    def __init__(self, index: int, count: int, heartbeat: int, workdir: str, keeper: subprocess.Popen):
        self.index, self.count, self.heartbeat, self.workdir, self.keeper = index, count, heartbeat, workdir, keeper

    @property
    def log(self) -> str:
        return f"{self.workdir}/{last_words.log_name(self.index)}"


def add_flags(parser) -> None:
    """The flags of every command that can run as many processes."""
    flags = parser.add_argument_group(
        "many processes", "the same command in each of them; none of these is needed where JAX detects the launcher"
    )
    flags.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others")
    flags.add_argument("--processes", type=int, metavar="N", help="how many processes there are")
    flags.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    flags.add_argument(
        "--distributed",
        choices=("auto", "off"),
        default="auto",
        help="auto (default): join the other processes of a Cloud TPU, GKE, Slurm or Open MPI job; off: a single process",
    )
    flags.add_argument(
        "--heartbeat", type=int, default=60, metavar="SECONDS", help="silence after which a process is taken for lost"
    )


def check(options) -> bool:
    """Whether the flags name the processes; UserError where they do so in part or wrongly."""
    given = {f"--{name}": getattr(options, name) for name in ("coordinator", "processes", "process")}
    missing = [name for name, value in given.items() if value is None]
    if options.heartbeat < 5:
        raise UserError(f"--heartbeat={options.heartbeat} is not allowed: it must be at least 5 seconds")
    if len(missing) == len(given):
        return False
    if missing:
        raise UserError(f"{missing[0]} is missing: {', '.join(given)} go together")
    if options.distributed == "off":
        raise UserError(f"--distributed=off is not allowed with --coordinator={options.coordinator}")
    host, _, port = options.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator={options.coordinator} is not allowed: it must be HOST:PORT")
    if options.processes < 1:
        raise UserError(f"--processes={options.processes} is not allowed: it must be at least 1")
    if not 0 <= options.process < options.processes:
        allowed = f"it must be from 0 to {options.processes - 1}, --processes being {options.processes}"
        raise UserError(f"--process={options.process} is not allowed: {allowed}")
    return True


@contextmanager
def joined(options, workdir: str = "."):
    """This process as one of many for the length of a `with` block; nothing at all for a single one.

    From here on what it says on standard error is marked with its number, and kept in `workdir`/errors/ should it end
    badly. UserError for flags that do not fit together, or where the others cannot be reached.
    """
    global _job
    named = check(options)
    if options.distributed == "off" or not _initialize(options, named):
        yield
        return
    import jax
    from jax._src.distributed import global_state  # there is no public way to ask without starting the devices

    index, count = global_state.process_id, global_state.num_processes
    if count > 1:
        _job = Job(index, count, options.heartbeat, workdir, last_words.keep(index, count, workdir))
    yield
    jax.distributed.shutdown()  # waits for the others
    if _job:
        last_words.farewell()
        _job = None


def _initialize(options, named: bool) -> bool:
    """Joins the runtime; False, at once, where no flags are given and JAX detects no launcher."""
    import jax

    flags = {}
    if named:
        if options.process == 0:
            _require_port(options.coordinator)
        names = {"coordinator_address": "coordinator", "num_processes": "processes", "process_id": "process"}
        flags = {name: getattr(options, flag) for name, flag in names.items()}
        flags["cluster_detection_method"] = "deactivate"
    timeouts = {"heartbeat_timeout_seconds": options.heartbeat, "shutdown_timeout_seconds": SHUTDOWN_SECONDS}
    try:
        with warnings.catch_warnings():
            if "JOB_COMPLETION_INDEX" not in os.environ:  # a pod that is not one of many needs no Kubernetes package
                warnings.simplefilter("ignore")
            jax.distributed.initialize(**flags, **timeouts)
    except ValueError as error:
        if not named and "coordinator_address" in str(error):
            return False
        raise
    except RuntimeError as error:
        if not named and "must be called before" in str(error):  # a library user's process, in which JAX runs already
            return False
        where = options.coordinator or "the coordinator that the launcher names"
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the other processes were not reached at --coordinator={where}: {reason}") from error
    _take_notices()
    return True


def _require_port(coordinator: str) -> None:
    """UserError where this process cannot listen at the coordinator's port: JAX's service may crash of it."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is left of a run that has ended is no matter
        try:
            probe.bind(("", int(coordinator.rpartition(":")[2])))
        except OSError as error:
            raise UserError(
                f"--coordinator={coordinator}: process 0 cannot listen at that port: {error.strerror}"
            ) from error


def _take_notices() -> None:
    """Gives SIGTERM back its usual action: JAX's handler only notes it, which is nothing where nobody asks for notices."""
    global _jax_handler
    _HANDLERS.PyOS_getsig.restype = ctypes.c_void_p
    _jax_handler = _HANDLERS.PyOS_getsig(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def heed_notices(heeded: bool) -> None:
    """Whether SIGTERM is from now on a notice to all processes, which the training loop asks for, or ends this one."""
    if several():
        _HANDLERS.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(_jax_handler if heeded else None))  # None is SIG_DFL


def several() -> bool:
    """Whether this process is one of many."""
    return _job is not None


def first() -> bool:
    """Whether this is the process that writes and prints: process 0, or the only one."""
    return _job is None or _job.index == 0


def first_does(action: Callable, what: str):
    """action() in the first process alone, while the others wait for it; its result there, None elsewhere.

    An error of it is raised in every process: as it is where it is a UserError or Stopped, otherwise as Stopped.
    """
    if not several():
        return action()
    result = error = None
    if first():
        try:
            result = action()
        except Exception as caught:
            error = caught
    kind, text = _broadcast(_described(error, what))
    if error:
        raise error
    if kind:
        raise {"UserError": UserError, "Stopped": Stopped}[kind](text)
    return result


def _described(error: Exception | None, what: str) -> tuple[str, str]:
    if error is None:
        return "", ""
    if isinstance(error, UserError | Stopped):
        return type(error).__name__, str(error)
    return "Stopped", f"process 0 failed ({what}): {type(error).__name__}: {error}"


def _broadcast(words: tuple[str, str], size: int = 4096) -> tuple[str, str]:
    """The first process's `words`, in every process."""
    import numpy as np
    from jax.experimental import multihost_utils

    text = "\0".join(words).encode()[:size]
    sent = np.frombuffer(text.ljust(size, b"\0"), np.uint8)
    received = bytes(multihost_utils.broadcast_one_to_all(sent).astype(np.uint8)).rstrip(b"\0")
    kind, _, rest = received.decode("utf8", "ignore").partition("\0")
    return kind, rest


def shared(value):
    """The first process's `value`, anything JSON can write, in every process."""
    if not several():
        return value
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    sent = np.frombuffer(json.dumps(value).encode() if first() else b"", np.uint8)
    size = int(broadcast_one_to_all(np.int32(len(sent))))
    received = broadcast_one_to_all(np.resize(sent, size) if first() else np.zeros(size, np.uint8))
    return json.loads(received.astype(np.uint8).tobytes())


def first_word(text: str, size: int = 512) -> str:
    """The first `text` that is not empty, in the order of the processes: what any of them says, all hear."""
    if not several():
        return text
    import numpy as np
    from jax.experimental import multihost_utils

    sent = np.frombuffer(text.encode()[:size].ljust(size, b"\0"), np.uint8)
    heard = [bytes(row).rstrip(b"\0").decode("utf8", "ignore") for row in multihost_utils.process_allgather(sent)]
    return next((f"{word} (in process {index})" for index, word in enumerate(heard) if word), "")


def wait_for_all(name: str) -> None:
    """Returns once every process is here."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def failed(error: Exception) -> str:
    """Keeps the stack trace of an error in this process's log, whose path it returns.

    Where the error looks like the loss of another process, JAX's runtime is given the time to find out which one: it
    then ends this process, and last_words.py says so.
    """
    for line in traceback.format_exception(error):
        last_words.whisper(line)
    if LOST.search(str(error)):
        time.sleep(_job.heartbeat + FINDING_SECONDS)
    return _job.log


def leave(code: int):
    """Ends this process at once: one that failed does not wait for the others, which may never come."""
    if _job.index == 0:
        time.sleep(WORDS_SECONDS)  # the others end with the first one: let them give their own reason
    last_words.farewell(kept=code not in (0, 2))
    os._exit(code)
