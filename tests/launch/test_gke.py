"""launch/gke.sh with stand-ins, and the manifest for a cluster without XPK."""

import math
import shlex
import subprocess

import pytest
import yaml

from tests.launch.stand_ins import ROOT
from xfresearch.studies import design
from xfresearch.studies.cells import jobs

JOB = shlex.split("--cluster c --workload w --tpu-type v6e-16 --image registry/x:1")
TRAIN = shlex.split("-- python -m xfresearch.train --config configs/llama.py --workdir gs://bucket/run")


@pytest.mark.parametrize(
    "options, programs",
    [
        ("", ["xpk workload create"]),
        ("--slices 4 --max-restarts 3 --zone us-east5-b --project p", ["xpk workload create"]),
        ("--create spot --build", ["xpk cluster create", "docker build", "docker push", "xpk workload create"]),
        ("--create reservation=mine --wait", ["xpk cluster create", "xpk workload create", "xpk workload list"]),
    ],
)
def test_a_dry_run_prints_the_commands_of_a_real_run(launcher, options, programs):
    arguments = [*JOB, *options.split(), *TRAIN]
    dry = launcher.run("gke.sh", "--dry-run", *arguments)
    assert dry.returncode == 0 and launcher.calls == []
    assert launcher.run("gke.sh", *arguments).returncode == 0
    assert [shlex.split(line) for line in dry.stdout.splitlines()] == launcher.calls
    assert [call[: len(name.split())] for call, name in zip(launcher.calls, programs, strict=True)] == [
        name.split() for name in programs
    ]


@pytest.mark.parametrize(("machine", "code"), [("v6e-8", 0), ("v6e-8 --slices 2", 2), ("v5p-16", 2), ("tpu7x-8", 2)])
def test_commands_of_one_process_need_one_host(launcher, machine, code):
    job = ["--", "python", "-m", "xfresearch.study", "--config", "configs/studies/w_o.py", "--workdir", "gs://b/s"]
    given = " ".join(JOB).replace("v6e-16", machine).split()
    done = launcher.run("gke.sh", *given, *job)
    assert done.returncode == code and ("it runs as one process, on one host" in done.stderr) == bool(code)
    assert bool(launcher.calls) == (not code)


@pytest.mark.parametrize("capacity", ["spot", "on-demand", "flex", "reservation=mine"])
def test_the_cluster_has_the_requested_capacity(launcher, capacity):
    launcher.run("gke.sh", *JOB, "--create", capacity, *TRAIN)
    assert launcher.calls[0][:3] == ["xpk", "cluster", "create"] and f"--{capacity}" in launcher.calls[0]


def test_the_command_arrives_unchanged_behind_the_entry_point(launcher):
    text = 'it\'s "quoted" $HOME'
    launcher.run("gke.sh", *JOB, "--", "python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", "--data", text)
    (call,) = launcher.calls
    words = shlex.split(call[call.index("--command") + 1])
    job = ["python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", "--data", text]
    assert words == ["exec", "launch/entrypoint.sh", *job]


def test_with_wait_the_exit_code_is_that_of_the_job(launcher):
    launcher.answers("xpk workload list", ("", 125))
    assert launcher.run("gke.sh", *JOB, "--wait", *TRAIN).returncode == 125


def test_no_job_starts_if_the_cluster_cannot_be_created(launcher):
    launcher.answers("xpk cluster create", ("", 1))
    assert launcher.run("gke.sh", *JOB, "--create", "spot", *TRAIN).returncode == 1
    assert len(launcher.calls) == 1


def test_the_manifest_requests_whole_slices_and_runs_our_image():
    manifest = yaml.safe_load((ROOT / "launch" / "gke.yaml").read_text())
    (group,) = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = math.prod(int(n) for n in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert job["parallelism"] == job["completions"] == chips / container["resources"]["limits"]["google.com/tpu"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"] and pod["restartPolicy"] == "Never"
    assert (ROOT / container["command"][0]).is_file()


def test_the_manifest_of_a_study_runs_one_cell_in_each_pod():
    manifest = yaml.safe_load((ROOT / "launch" / "gke_study.yaml").read_text())["spec"]
    (container,) = manifest["template"]["spec"]["containers"]
    arguments = container["args"]
    study = design.read(["--config", arguments[arguments.index("--config") + 1]])
    assert manifest["completionMode"] == "Indexed" and manifest["completions"] == len(jobs(study))
    assert arguments[:3] == ["python", "-m", "xfresearch.study"] and arguments[-2:] == ["--cell", "auto"]


def test_the_image_has_the_name_of_its_commit(launcher):
    launcher.run("gke.sh", *JOB, "--build", *TRAIN)
    (build,) = (call for call in launcher.calls if call[:2] == ["docker", "build"])
    (given,) = (word for word in build if word.startswith("COMMIT="))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert given.removeprefix("COMMIT=").removesuffix("-dirty") == head
    assert 'RUN echo "$COMMIT" > COMMIT' in (ROOT / "launch" / "Dockerfile").read_text().splitlines()


def test_the_image_contains_the_files_of_the_manifest_and_the_scripts():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    sources = [word for words in copied for word in words]
    assert {"launch", "configs", "xfresearch", "requirements-cloud.txt"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{source}" in ignored for source in sources)
