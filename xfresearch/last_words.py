"""What a process of many says on standard error, marked with its number, and kept where it ends badly.

JAX's runtime ends a process from within (abort, after pages of C++) when another one is lost; nothing in that process can
still explain it. So standard error runs through a small process of its own, started as `python last_words.py INDEX COUNT
WORKDIR`: it marks every line, keeps the last ones, and when the end comes without a farewell writes them to
WORKDIR/errors/process-INDEX.log and says in one line what happened.
"""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

LINES = 2000  # kept of each process
FAREWELL, WHISPER = "\x04", "\x05"  # a line with the first ends well; one with the second is for the log alone
OURS = re.compile(r"(error|stopped|failed|interrupted|warning)\b")
RUNTIME = re.compile(r"[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync|.*distributed)")
UNHEALTHY = re.compile(r"unhealthy \(stopped sending heartbeats\):\n((?:\d+\n)+)|Task (\d+) heartbeat timeout")
NO_COORDINATOR = re.compile(r"leader task was preempted|Socket closed|[Ff]ailed to connect|Connection refused")
NOISE = re.compile(r"\[Gloo\] Rank")


def log_name(index: int) -> str:
    return f"errors/process-{index}.log"


def keep(index: int, count: int, workdir: str) -> subprocess.Popen:
    """From now on this process's standard error (and standard output, but for process 0) goes through a keeper."""
    sys.stdout.flush(), sys.stderr.flush()
    command = [sys.executable, "-P", __file__, str(index), str(count), workdir]
    # A session of its own: a launcher that kills the process by its group leaves the keeper its last line.
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
    os.dup2(keeper.stdin.fileno(), 2)
    if index:
        os.dup2(2, 1)
    keeper.stdin.close()
    return keeper


def whisper(text: str) -> None:
    """`text` for the log alone."""
    os.write(2, "".join(f"{WHISPER}{line}\n" for line in text.splitlines()).encode())  # at once: others write too


def farewell(kept: bool = False) -> None:
    """This process has said all it had to say; where that is to be `kept`, it goes to the log."""
    sys.stdout.flush(), sys.stderr.flush()
    os.write(2, f"{FAREWELL}{'kept' if kept else ''}\n".encode())


def main(index: int, count: int, workdir: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # outlives the process that it listens to
    sys.stdin.reconfigure(errors="replace")
    kept, quiet, ending = deque(maxlen=LINES), False, None
    for line in sys.stdin:
        if line.startswith(FAREWELL):
            ending = line.strip("\n" + FAREWELL)
            continue
        kept.append(line.lstrip(WHISPER))
        quiet = quiet or bool(RUNTIME.search(line))  # what follows are the runtime's own last pages
        if OURS.match(line) or not (quiet or line.startswith(WHISPER) or NOISE.match(line)):
            say(index, line)
    if ending is None:
        say(index, verdict("".join(kept), index, count, workdir) + "\n")
    if ending != "":
        path = place(workdir) / log_name(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(kept))


def say(index: int, line: str) -> None:
    sys.stdout.write(f"[process {index}] {line}")
    sys.stdout.flush()


def verdict(text: str, index: int, count: int, workdir: str) -> str:
    """One line on why a process ended without a farewell, from the `text` of its last lines."""
    log = f"{workdir}/{log_name(index)}"
    lost = sorted({int(number) for match in UNHEALTHY.findall(text) for number in " ".join(match).split()} - {index})
    if not lost and index and NO_COORDINATOR.search(text):
        lost = [0]
    if not lost:
        return f"stopped: process {index} of {count} was killed or crashed; its last lines are in {log}"
    who = f"process {lost[0]}" if len(lost) == 1 else "processes " + ", ".join(map(str, lost))
    verb = "is" if len(lost) == 1 else "are"
    return f"stopped: {who} of {count} {verb} gone; {going_on(workdir)} (details in {log})"


def going_on(workdir: str) -> str:
    saved = place(workdir) / "checkpoints"
    found = [path for path in saved.iterdir() if path.name.isdigit()] if saved.exists() else []
    # In a bucket nothing is renamed: what is written there last says that the rest is whole (training/checkpoint.py).
    steps = [int(path.name) for path in found if "://" not in workdir or (path / "commit_success.txt").exists()]
    return f"the same command goes on from step {max(steps, default=0)}"


def place(workdir: str):
    if "://" not in workdir:  # at once: whoever started the process may look as soon as it has ended
        return Path(workdir).expanduser()
    from etils import epath

    return epath.Path(workdir)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
