"""Standard error of one process among several: every line gets the process number, and a crash leaves a log file.

When another process is lost, JAX's runtime aborts this process from C++ and prints pages while it does. This process
can then explain nothing itself. So its standard error goes to a small monitor process, started as `python crash_log.py
INDEX COUNT WORKDIR`. The monitor prefixes every line and keeps the last ones. If the stream ends without an end marker,
the monitor writes these lines to WORKDIR/errors/process-INDEX.log and prints one line that gives the reason.
"""

import io
import os
import re
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

LINES = 2000  # the number of last lines kept for each process
END = "\x04"  # starts the end marker: the process ended in order
LOG_ONLY = "\x05"  # starts a line that goes to the log and is not printed
EMERGENCY = "\x06"  # starts the path of this process's emergency checkpoints
OURS = re.compile(r"(error|stopped|failed|interrupted|warning)\b")
RUNTIME = re.compile(r"[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync|.*distributed)")
UNHEALTHY = re.compile(r"unhealthy \(stopped sending heartbeats\):\n((?:\d+\n)+)|Task (\d+) heartbeat timeout")
NO_COORDINATOR = re.compile(r"leader task was preempted|Socket closed|[Ff]ailed to connect|Connection refused")
NOISE = re.compile(r"\[Gloo\] Rank")


def log_name(index: int) -> str:
    return f"errors/process-{index}.log"


def start_monitor(index: int, count: int, workdir: str) -> subprocess.Popen:
    """Sends standard error through a new monitor process; for all but process 0, standard output too."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", __file__, str(index), str(count), workdir]
    # A new session: a launcher that kills this process's group leaves the monitor alive to print the last line.
    monitor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
    assert monitor.stdin is not None  # it is a pipe
    os.dup2(monitor.stdin.fileno(), 2)
    if index:
        os.dup2(2, 1)
    monitor.stdin.close()
    return monitor


def write_log_only(text: str) -> None:
    """Sends `text` to the log without printing it."""
    # One write call: other threads write to standard error too.
    os.write(2, "".join(f"{LOG_ONLY}{line}\n" for line in text.splitlines()).encode())


def send_emergency(path: str) -> None:
    """Tells the monitor where this process keeps its emergency checkpoints."""
    os.write(2, f"{EMERGENCY}{path}\n".encode())


def send_end(keep_log: bool = False) -> None:
    """Tells the monitor that this process ends in order; with `keep_log`, the monitor writes the log all the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{END}{'kept' if keep_log else ''}\n".encode())


def main(index: int, count: int, workdir: str) -> None:
    """The monitor process: prints and keeps lines from standard input until the stream ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the monitor must outlive the process that it monitors
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    kept: deque[str] = deque(maxlen=LINES)
    quiet = False
    ending = None
    emergency = ""
    for line in sys.stdin:
        if line.startswith(EMERGENCY):
            emergency = line.strip("\n" + EMERGENCY)
            continue
        if line.startswith(END):
            ending = line.strip("\n" + END)
            continue
        kept.append(line.lstrip(LOG_ONLY))
        quiet = quiet or bool(RUNTIME.search(line))  # from here on the runtime prints its own pages
        if OURS.match(line) or not (quiet or line.startswith(LOG_ONLY) or NOISE.match(line)):
            print_line(index, line)
    if ending is None:
        print_line(index, diagnose("".join(kept), index, count, workdir, emergency) + "\n")
    if ending != "":
        path = as_path(workdir) / log_name(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        if any("://" not in workdir and each.is_symlink() for each in (path, path.parent)):
            print_line(index, f"warning: {path} is not written: it is a link, or in one\n")
        else:
            path.write_text("".join(kept))


def print_line(index: int, line: str) -> None:
    sys.stdout.write(f"[process {index}] {line}")
    sys.stdout.flush()


def diagnose(text: str, index: int, count: int, workdir: str, emergency: str = "") -> str:
    """One line that gives the reason for an end without an end marker, read from the last lines `text`."""
    log = f"{workdir}/{log_name(index)}"
    lost = sorted({int(number) for match in UNHEALTHY.findall(text) for number in " ".join(match).split()} - {index})
    if not lost and index and NO_COORDINATOR.search(text):
        lost = [0]
    if not lost:
        return f"stopped: process {index} of {count} was killed or crashed; its last lines are in {log}"
    names = f"process {lost[0]}" if len(lost) == 1 else "processes " + ", ".join(map(str, lost))
    verb = "is" if len(lost) == 1 else "are"
    return f"stopped: {names} of {count} {verb} lost; {resume_hint(workdir, emergency)} (details in {log})"


def resume_hint(workdir: str, emergency: str = "") -> str:
    """Names the step from which the run will resume."""
    saved = newest_good(as_path(workdir) / "checkpoints")
    kept = newest_good(as_path(emergency)) if emergency else 0
    if kept > saved:
        return (
            f"the same command resumes from the emergency checkpoint of step {kept}, or from an earlier one if a machine "
            f"that had it is lost (the newest in {workdir} is step {saved})"
        )
    return f"the same command resumes from step {saved}"


def newest_good(directory) -> int:
    """The step of the newest good checkpoint in a directory; 0 without one."""
    found = list(directory.iterdir()) if directory.exists() else []
    found = [path for path in found if re.fullmatch("[0-9]{1,18}", path.name)]
    # A good checkpoint has the first of these files and not the second (checkpoints/validity.py).
    good = [path for path in found if (path / "commit_success.txt").exists() and not (path / "rejected").exists()]
    return max((int(path.name) for path in good), default=0)


def as_path(workdir: str):
    if "://" not in workdir:  # no slow import: the launcher may read the log as soon as the process has ended
        return Path(workdir).expanduser()
    from etils import epath

    return epath.Path(workdir)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
