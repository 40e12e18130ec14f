"""Stand-ins for gcloud, xpk, kubectl, docker, sbatch, srun and scontrol (stand_in.sh), which record how they were called.

A test fails if a script uses a flag that the real program does not have (FLAGS).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ("gcloud", "xpk", "kubectl", "docker", "sbatch", "srun", "scontrol", "ssh-add", "tar")

TPUS = "gcloud compute tpus queued-resources"
PLACE = "--zone --project"
HOSTS = f"{PLACE} --worker --node --batch-size --internal-ip --tunnel-through-iap"
NODES = "--nodes --ntasks-per-node --gpus-per-node --cpus-per-task --mem"
# Flags that the programs accept, from their references: gcloud 528 (Google Cloud SDK, "gcloud compute tpus
# queued-resources create", ssh and scp, 2025-05 to 2025-09), xpk 1.16.0 (parser/cluster.py, parser/workload.py), Slurm's
# manuals of sbatch and srun, Docker's.
FLAGS = {
    f"{TPUS} create": f"{PLACE} --accelerator-type --runtime-version --node-id --node-count --node-prefix --spot "
    "--guaranteed --reserved --network --subnetwork --internal-ips --scopes --service-account",
    f"{TPUS} list": f"{PLACE} --filter --format",
    "gcloud compute tpus tpu-vm list": f"{PLACE} --filter --format",
    f"{TPUS} scp": f"{HOSTS} --scp-flag",
    f"{TPUS} ssh": f"{HOSTS} --ssh-flag --command",
    f"{TPUS} delete": f"{PLACE} --force --quiet",
    "gcloud storage ls": "",
    "xpk cluster create": f"{PLACE} --cluster --tpu-type --device-type --num-slices --num-nodes --spot --on-demand --flex "
    "--reservation",
    "xpk cluster delete": f"{PLACE} --cluster",
    "xpk workload create": f"{PLACE} --cluster --workload --tpu-type --device-type --num-slices --num-nodes --docker-image "
    "--env --env-file --command --max-restarts --termination-grace-period-seconds --ramdisk-directory "
    "--restart-on-exit-codes",
    "xpk workload list": f"{PLACE} --cluster --wait-for-job-completion --filter-by-job",
    "xpk workload delete": f"{PLACE} --cluster --workload --force",
    "kubectl apply": "-f",
    "kubectl create serviceaccount": "",
    "kubectl get": "--ignore-not-found -o",
    "kubectl delete": "-f",
    "kubectl logs": "-f -l --prefix",
    "sbatch": f"{NODES} --job-name --output --time --partition --account --array --qos --signal "
    "--requeue --open-mode --chdir",
    "srun": f"{NODES} --ntasks --kill-on-bad-exit --wait --label --container-image --container-mounts --container-workdir",
    "scontrol requeue": "",
    "docker build": "--platform --build-arg --tag --file",
    "docker push": "",
    "docker run": "--rm --init --gpus --ipc --volume --env --user",
}
JOB_STARTS_WITH = {"sbatch": "launch/slurm.sbatch", "srun": "env", "docker run": "python"}


# Words that some layer between the user and the process could change: a shell, YAML, JSON, or Kubernetes' own variables.
WORDS = {
    "quotes": "it's \"quoted\" \\ $HOME",
    "variables": "$(HF_TOKEN) $$ $$(HF_TOKEN) $( $) ${X} $",
    "shell": "`id` $(id) *;&|<>!~ #no comment",
    "lines": "a\nb\r\nc\rd\te\x85f\u2028g\u2029h",
    "control": "\x01\x1b[31m\x7f\x80\x9f",
    "marks": "\ufeff\ufffe\uffff\u202e\xa0",
    "letters": "é 中文 😀 \U000e0001",
    "yaml": "{a: [b, *c, &d]} - !!str |",
    "numbers": "1e3",
    "nothing": "",
    "space": "  ",
}


def expanded(word: str, variables: dict[str, str]) -> str:
    """A word of a container's command as its process gets it: Kubernetes' documented expansion of variables.

    $(NAME) is the value of NAME, or stays as it is without such a variable; $$ is $; any other $ stays.
    """
    pattern = r"\$(?:(\$)|\(([^)]*)\))"
    return re.sub(pattern, lambda match: match[1] or variables.get(match[2], match[0]), word, flags=re.S)


def words_of(command: str) -> list[str]:
    """The words of a command line as bash reads them."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def install(folder: Path) -> None:
    """Makes the programs, in `folder`/bin."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        (programs / name).symlink_to(Path(__file__).with_name("stand_in.sh"))


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
    flags = [word.partition("=")[0] for word in words[:end] if word.startswith("-") and word != "-"]
    return [flag for flag in flags if flag not in FLAGS[name].split()]


def calls(folder: Path) -> list[list[str]]:
    """The words of every call, in their order. Folders that a script makes for a while have the name FOLDER."""
    path = folder / "calls"
    text = path.read_bytes().decode() if path.exists() else ""
    return [without_folders(call).split("\x1f")[:-1] for call in text.split("\x1e")[:-1]]


def without_folders(text: str) -> str:
    return re.sub(r"\S*/xfresearch-[A-Za-z0-9]{6}(?=/)", "FOLDER", text)


class Launcher:
    """Runs launch scripts with the stand-ins."""

    def __init__(self, folder: Path):
        self.folder = folder
        install(folder)
        self.environment = environment(folder)

    def answers(self, pattern: str, *queue) -> None:
        """Sets the answers to the next calls that match `pattern`: each is output, or (output, exit code[, seconds])."""
        rules = self.folder / "answers"
        rule = rules / f"{len(list(rules.glob('*'))):03}"
        rule.mkdir(parents=True)
        (rule / "pattern").write_text(pattern + "\n")
        for number, entry in enumerate(queue):
            text, code, seconds = (entry, 0, 0) if isinstance(entry, str) else (*entry, 0)[:3]
            (rule / f"{number:03}.answer").write_text(f"{code} {seconds}\n{text}")

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            # Background processes inherit an ignored SIGINT, and those of nohup an ignored SIGHUP.
            [
                shutil.which("env"),
                "--default-signal=INT,HUP",
                shutil.which("bash"),
                str(ROOT / "launch" / script),
                *arguments,
            ],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(timeout=60)
        for call in self.calls:
            assert not unknown_flags(call), f"{program_of(call)} has no {unknown_flags(call)}"
        return subprocess.CompletedProcess(process.args, process.returncode, without_folders(out), without_folders(err))

    @property
    def calls(self) -> list[list[str]]:
        return calls(self.folder)

    @property
    def verbs(self) -> list[str]:
        """The last subcommand of each call: create, list, ssh, ...; `nodes` for `tpu-vm list`."""
        programs = [program_of(call) for call in self.calls]
        return ["nodes" if program.endswith("tpu-vm list") else program.split()[-1] for program in programs]
