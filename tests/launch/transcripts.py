"""python -m tests.launch.transcripts

Writes docs/data/tables/launch_output.md: what the launchers print in certain events. The events are played by the
stand-ins, so nothing was run on a cloud; test_transcripts.py checks that the page has what the scripts print now, and how
each event ends.
"""

import os
import re
import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.launch.stand_ins import ROOT, TPUS, Launcher, without_folders

PAGE = ROOT / "docs" / "data" / "tables" / "launch_output.md"
JOB = "python -m xfresearch.train --config configs/llama.py --workdir gs://my-bucket/llama --config.mesh.fsdp=16"
TPU_VM = "tpu_vm.sh --name llama --zone {} --accelerator v6e-16 --spot"
LIST, NODES, SSH, SAVED = f"{TPUS} list", "tpu-vm list", "detached", "storage ls"
_ERROR = "ERROR: (gcloud.compute.tpus.queued-resources."
QUOTA = f"{_ERROR}create) RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded."
NO_ZONE = f"{_ERROR}list) PERMISSION_DENIED: Permission denied on 'locations/europe-west4-z' (or it may not exist)."
NO_CAPACITY = "FAILED\tThere is no more capacity in the zone"


TITLE = """# What the launch scripts print

The events are played by `python -m tests.launch.transcripts` with stand-ins of `gcloud`, `xpk` and Slurm. The commands that
the scripts print (lines with `+`) are left out. [Launching](../../launch.md).
"""


class Event(NamedTuple):
    """An event: what it is, the command, the answers of the stand-ins, the exit code, and a signal to the script."""

    title: str
    command: str
    answers: tuple = ()  # (pattern, answer, ...) of each kind of call
    code: int = 0
    closes: bool = False  # the terminal is closed while the job runs
    inside: dict[str, str] = {}  # the variables of a job in which the script runs


def tpu_vm(title: str, zone: str, *answers, code: int = 0, extra: str = "", closes: bool = False) -> Event:
    return Event(title, f"{TPU_VM.format(zone)}{extra} -- {JOB}", answers, code, closes)


EVENTS = (
    tpu_vm("It finishes", "europe-west4-a", (LIST, "", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE")),
    tpu_vm("The quota does not suffice", "europe-west4-a", (f"{TPUS} create", (QUOTA, 1)), code=1),
    tpu_vm("There is no such zone", "europe-west4-z", (LIST, (NO_ZONE, 1)), code=1),
    tpu_vm(
        "Zones in turn: one refuses, one has no machines",
        "europe-west4-a,us-east5-b,us-east1-d",
        (f"{TPUS} create", (QUOTA, 1)),
        (f"{LIST} --zone us-east5-b", "", NO_CAPACITY),
    ),
    tpu_vm(
        "Preempted twice, and repaired once",
        "europe-west4-a",
        (LIST, "", "ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE", "ACTIVE", "ACTIVE"),
        (NODES, "READY\tHEALTHY", "READY\tHEALTHY", "PREEMPTED\t", "PREEMPTED\t", "REPAIRING\t", "READY\tHEALTHY"),
        (SSH, ("", 143), ("", 255)),
        (SAVED, "gs://my-bucket/llama/checkpoints/500/", "gs://my-bucket/llama/checkpoints/1500/"),
    ),
    tpu_vm("One host of several has vanished", "europe-west4-a", ("scp", *[("", 255)] * 3)),
    tpu_vm("The terminal is closed", "europe-west4-a", (SSH, ("", 0, 60)), code=129, closes=True),
    tpu_vm("The terminal was closed: reconnect", "europe-west4-a", (LIST, "ACTIVE", "ACTIVE", "ACTIVE"), extra=" --attach"),
    tpu_vm("A second launch", "europe-west4-a", (LIST, "ACTIVE"), code=2),
    tpu_vm(
        "The machines cannot be deleted",
        "europe-west4-a",
        ("queued-resources delete", *[("ERROR: UNAVAILABLE", 1)] * 5),
        code=1,
    ),
)

XPK = "gke.sh --cluster tpus --workload my-job --tpu-type v6e-16 --slices 2 --image REPOSITORY/xfresearch:3f2a9c0d1e4b"
HEAD = "Jobset Name   Created Time   Priority   Needed   Running   Done   Status"
EVENTS += (
    Event("GKE: the job finishes", f"{XPK} --wait -- {JOB}"),
    Event("GKE: the job fails", f"{XPK} --wait -- {JOB}", (("wait-for-job-completion", ("", 125)),), 125),
    Event(
        "GKE: a second launch",
        f"{XPK} -- {JOB}",
        (("workload list", f"{HEAD}\nmy-job   03:00   medium   8   8   0   Admitted"),),
        2,
    ),
    Event(
        "GKE: the job has ended, and is started again",
        f"{XPK} -- {JOB}",
        (("workload list", f"{HEAD}\nmy-job   03:00   medium   8   8   0   Finished"),),
    ),
)

SBATCH = "slurm.sbatch --nodes 2 --gpus-per-node 8 --partition gpu"
PREEMPTED = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2"}
EVENTS += (
    Event("Slurm: submitted", f"{SBATCH} -- {JOB}"),
    Event("Slurm: the job is preempted, and requeued", f"{SBATCH} -- {JOB}", (("srun", ("", 143)),), 143, inside=PREEMPTED),
)


def play(event: Event, folder: Path) -> tuple[str, int, list[str]]:
    """What a person sees in an event, the exit code of the script, and the verbs of its calls."""
    launcher = Launcher(folder)
    for pattern, *queue in event.answers:
        launcher.answers(pattern, *queue)
    script, *arguments = shlex.split(event.command)
    if script == "tpu_vm.sh":
        arguments = ["--poll", "0", *arguments]
    if event.closes:
        code, said = _with_closed_terminal(launcher, script, arguments)
    else:
        done = launcher.run(script, *arguments, **event.inside)
        code, said = done.returncode, done.stderr
    return _shortened(said), code, launcher.verbs


def _with_closed_terminal(launcher: Launcher, script: str, arguments: list[str]) -> tuple[int, str]:
    process = launcher.start(script, *arguments)
    deadline = time.monotonic() + 30
    while launcher.verbs.count("ssh") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGHUP)  # a terminal sends it to all processes that it started
    _, said = process.communicate(timeout=20)
    return process.returncode, without_folders(said)


def _shortened(text: str) -> str:
    """What a script printed, without the commands that it runs."""
    return "\n".join(line for line in text.splitlines() if not re.search(r"^\+ |pack.sh|files are not packed|^Hangup", line))


def page(folder: Path) -> str:
    """The events in which a script says something, as docs/data/tables/launch_output.md."""
    said = [play(event, folder / str(number))[0] for number, event in enumerate(EVENTS)]
    parts = [f"## {event.title}\n\n```text\n{text}\n```\n" for event, text in zip(EVENTS, said, strict=True) if text]
    return "\n".join([TITLE, *parts])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(page(Path(made)))
