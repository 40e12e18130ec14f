"""Stand-ins for gcloud, xpk, kubectl, docker, sbatch, srun and scontrol, which record how they were called.

Each fails on a flag that the real program does not have (FLAGS), and appends its arguments to a file. It answers as the
test specified, otherwise like a cloud without failures.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ("gcloud", "xpk", "kubectl", "docker", "sbatch", "srun", "scontrol", "ssh-add")

TPUS = "gcloud compute tpus queued-resources"
PLACE = "--zone --project"
NODES = "--nodes --ntasks-per-node --gpus-per-node --cpus-per-task"
# Flags that the programs accept, from their references: gcloud 528 (create.yaml, ssh.py, scp.py, delete.yaml,
# list.yaml), xpk of June 2026 (parser/cluster.py, parser/workload.py), Slurm's manuals of sbatch and srun, Docker's.
FLAGS = {
    f"{TPUS} create": f"{PLACE} --accelerator-type --runtime-version --node-id --node-count --node-prefix --spot "
    "--guaranteed --network --scopes --service-account",
    f"{TPUS} list": f"{PLACE} --filter --format",
    "gcloud compute tpus tpu-vm list": f"{PLACE} --filter --format",
    f"{TPUS} scp": f"{PLACE} --worker --node --batch-size",
    f"{TPUS} ssh": f"{PLACE} --worker --node --batch-size --command",
    f"{TPUS} delete": f"{PLACE} --force --quiet",
    "xpk cluster create": f"{PLACE} --cluster --tpu-type --num-slices --spot --on-demand --flex --reservation",
    "xpk cluster delete": f"{PLACE} --cluster",
    "xpk workload create": f"{PLACE} --cluster --workload --tpu-type --num-slices --docker-image --env --command "
    "--max-restarts --termination-grace-period-seconds",
    "xpk workload list": f"{PLACE} --cluster --wait-for-job-completion",
    "sbatch": f"{NODES} --job-name --output --time --partition --account --array --signal --requeue "
    "--open-mode --chdir",
    "srun": f"{NODES} --ntasks --kill-on-bad-exit --wait --label",
    "scontrol requeue": "",
    "docker build": "--platform --build-arg --tag --file",
    "docker push": "",
    "docker run": "--rm --init --gpus --ipc --volume --env",
}
JOB_STARTS_WITH = {"sbatch": "launch/slurm.sbatch", "srun": "env", "docker run": "python"}


def install(folder: Path) -> None:
    """Writes the programs to `folder`/bin."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        path = programs / name
        path.write_text(
            f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({__file__!r}, {{'NAME': {name!r}}}, 'stand_in')\n"
        )
        path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """An environment whose PATH starts with `folder`/bin; the programs there record their calls in `folder`/calls."""
    path = f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "STAND_INS": str(folder), "TMPDIR": str(folder)}


def program_of(words: list[str]) -> str:
    """The program and its subcommands: 'gcloud compute tpus queued-resources create'."""
    joined = " ".join(words)
    known = [name for name in FLAGS if joined == name or joined.startswith(f"{name} ")]
    return max(known, key=len, default=joined)


def unknown_flags(words: list[str]) -> list[str]:
    """Flags in `words` that the called program does not have."""
    name = program_of(words)
    if name not in FLAGS:
        return []
    end = words.index(JOB_STARTS_WITH[name]) if JOB_STARTS_WITH.get(name) in words else len(words)
    flags = [word.partition("=")[0] for word in words[:end] if word.startswith("-")]
    return [flag for flag in flags if flag not in FLAGS[name].split()]


def answer(words: list[str], folder: Path) -> tuple[str, int, float]:
    """(output, exit code, seconds): the next answer that the test specified, otherwise one without failures."""
    rules = folder / "answers"
    if rules.exists():
        table = json.loads(rules.read_text())
        for pattern, queue in table:
            if queue and re.search(pattern, " ".join(words)):
                out, code, seconds = queue.pop(0)
                rules.write_text(json.dumps(table))
                return out, code, seconds
    before = [program_of(call) for call in calls(folder)]
    exists = before.count(f"{TPUS} create") > before.count(f"{TPUS} delete")
    state = {f"{TPUS} list": "ACTIVE" if exists else "", "gcloud compute tpus tpu-vm list": "READY"}
    return state.get(program_of(words), ""), 0, 0.0


def calls(folder: Path) -> list[list[str]]:
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(name: str) -> None:
    folder = Path(os.environ["STAND_INS"])
    words = [name, *sys.argv[1:]]
    out, code, seconds = answer(words, folder)
    with (folder / "calls").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if wrong := unknown_flags(words):
        sys.exit(f"{program_of(words)} has no {wrong}")
    if words[:4] == ["gcloud", "storage", "cp", "-r"] and words[4].startswith("gs://"):
        shutil.copytree("runs/a", Path(words[5]) / Path(words[4]).name)  # runs/a stands for the downloaded run
    time.sleep(seconds)
    print(out)
    sys.exit(code)


class Launcher:
    """Runs launch scripts with the stand-ins."""

    def __init__(self, folder: Path):
        self.folder = folder
        install(folder)
        self.environment = environment(folder)

    def answers(self, pattern: str, *queue) -> None:
        """Sets the answers to the next calls that match `pattern`: each is output, or (output, exit code[, seconds])."""
        path = self.folder / "answers"
        table = json.loads(path.read_text()) if path.exists() else []
        full = [(entry, 0, 0.0) if isinstance(entry, str) else (*entry, 0.0)[:3] for entry in queue]
        path.write_text(json.dumps([*table, [pattern, full]]))

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            # Background processes inherit an ignored SIGINT.
            [shutil.which("env"), "--default-signal=INT", shutil.which("bash"), str(ROOT / "launch" / script), *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def calls(self) -> list[list[str]]:
        return calls(self.folder)

    @property
    def verbs(self) -> list[str]:
        """The last subcommand of each call: create, list, ssh, ...; `nodes` for `tpu-vm list`."""
        programs = [program_of(call) for call in self.calls]
        return ["nodes" if program.endswith("tpu-vm list") else program.split()[-1] for program in programs]


if __name__ == "stand_in":
    main(NAME)  # noqa: F821 - defined by the program that runs this file
