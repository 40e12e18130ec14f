"""launch/gke.sh with stand-ins."""

import shlex
import subprocess
import textwrap

import pytest
import yaml

from tests.launch.stand_ins import ROOT, WORDS, expanded, words_of

JOB = shlex.split("--cluster c --workload w --tpu-type v6e-16 --image registry/x:1")
TRAIN = shlex.split("-- python -m xfresearch.train --config configs/llama.py --workdir gs://bucket/run")
GPUS = shlex.split("--cluster c --workload w --gpu-type h100-mega-80gb-8 --nodes 4 --image registry/x:1")
TABLE = "Jobset Name   Created Time           Priority   TPU/GPU VMs Needed   TPU/GPU VMs Running/Ran   TPU/GPU VMs Done   "
TABLE += "Status     Status Message       Status Time\n{:11}   2026-11-28T03:00:00Z   medium     4                    "
TABLE += "4                         0                  {:8}   a message of words   2026-11-28T03:01:00Z\n"


@pytest.mark.parametrize(
    "options, programs",
    [
        ("", ["xpk workload list", "xpk workload create"]),
        ("--ramdisk memory", ["xpk workload list", "xpk workload create"]),
        ("--slices 4 --max-restarts 3 --zone us-east5-b --project p", ["xpk workload list", "xpk workload create"]),
        (
            "--create spot --build --image registry/x",
            ["xpk cluster create", "xpk workload list", "docker build", "docker push", "xpk workload create"],
        ),
        (
            "--create reservation=mine --wait",
            ["xpk cluster create", "xpk workload list", "xpk workload create", "xpk workload list"],
        ),
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
    assert not list(launcher.folder.glob("xfresearch-*"))


# Hosts as in xpk 1.16.0, core/system_characteristics.py: one chip, or 4 (8 cores of v4 and v5p). A host of tpu7x has two
# containers with a process each.
ONE_HOST = ("v4-8", "v5p-8", "v4-2x2x1", "v5p-2x2x1", "v6e-1", "v6e-4", "v6e-1x1", "v6e-2x2")
SEVERAL = ("v6e-8", "v6e-2x4", "v5litepod-8", "v5litepod-2x4", "v5p-16", "tpu7x-8", "v6e-4 --slices 2")


@pytest.mark.parametrize(("machine", "code"), [*((name, 0) for name in ONE_HOST), *((name, 2) for name in SEVERAL)])
def test_commands_of_one_process_need_one_host(launcher, machine, code):
    job = ["--", "python", "-m", "xfresearch.study", "--config", "configs/studies/w_o.py", "--workdir", "gs://b/s"]
    given = " ".join(JOB).replace("v6e-16", machine).split()
    done = launcher.run("gke.sh", "--dry-run", *given, *job)
    assert done.returncode == code and ("it runs as one process, on one host" in done.stderr) == bool(code)
    assert "--join-timeout" not in done.stdout


def test_faults_that_may_pass_restart_the_job_and_slices_wait_for_each_other(launcher):
    """XPK restarts after 42 and 127 to 255 by itself: not after 75, a join time-out or a full disk."""
    launcher.run("gke.sh", *JOB, *TRAIN)
    call = launcher.calls[-1]
    assert call[call.index("--restart-on-exit-codes") + 1] == "1,75"
    assert call[call.index("--command") + 1].endswith(" --join-timeout 3600")
    launcher.run("gke.sh", *JOB, "--join-timeout", "60", *TRAIN)
    assert launcher.calls[-1][-1].endswith(" --join-timeout 60")
    launcher.run("gke.sh", *JOB, *TRAIN, "--join-timeout=5")
    assert launcher.calls[-1][-1].endswith(" --join-timeout=5")


@pytest.mark.parametrize("capacity", ["spot", "on-demand", "flex", "reservation=mine"])
def test_the_cluster_has_the_requested_capacity(launcher, capacity):
    done = launcher.run("gke.sh", "--dry-run", *JOB, "--create", capacity, *TRAIN)
    assert done.stdout.startswith("xpk cluster create ") and f" --{capacity}\n" in done.stdout


def test_the_ram_disk_of_the_nodes_is_mounted_for_emergency_checkpoints(launcher):
    launcher.run("gke.sh", *JOB, "--ramdisk", "memory", *TRAIN, "--config.checkpoint.emergency=/memory")
    call = launcher.calls[-1]
    assert call[:3] == ["xpk", "workload", "create"] and call[call.index("--ramdisk-directory") + 1] == "memory"


def test_the_command_arrives_unchanged_behind_the_entry_point(launcher):
    """XPK puts it into a block of YAML that a shell of the container runs (docker_container.py of xpk 1.16)."""
    given = " ".join(JOB).replace("v6e-16", "v6e-4").split()
    job = ["python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", *WORDS.values()]
    launcher.run("gke.sh", *given, "--", *job)
    call = launcher.calls[-1]
    block = "- |\n" + textwrap.indent(call[call.index("--command") + 1], "  ")
    (command,) = yaml.safe_load(block)
    assert words_of(expanded(command, {"HF_TOKEN": "a secret", "X": "x"})) == ["exec", "launch/entrypoint.sh", *job]


def test_the_short_form_of_a_command_is_that_of_the_machines(launcher):
    """They have the checkout, and no program `xfresearch`."""
    launcher.run("gke.sh", *JOB, "--", "xfresearch", "train", *TRAIN[4:])
    assert "exec launch/entrypoint.sh python -m xfresearch train --config" in launcher.calls[-1][-1]
    assert launcher.calls[-1][-1].endswith("--join-timeout 3600")


def test_nodes_of_gpus_get_the_coordinator_that_xpk_names(launcher):
    launcher.run("gke.sh", *GPUS, *TRAIN)
    call = launcher.calls[-1]
    assert call[call.index("--device-type") + 1] == "h100-mega-80gb-8" and call[call.index("--num-nodes") + 1] == "4"
    assert "JAX_PLATFORMS=cuda,cpu" in call and "--tpu-type" not in call
    names = "--coordinator $JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT --processes $NNODES --process $NODE_RANK"
    assert expanded(call[call.index("--command") + 1], {}).endswith(names)
    one = ["1" if word == "4" else word for word in GPUS]
    launcher.run("gke.sh", *one, *TRAIN)
    assert "--coordinator" not in launcher.calls[-1][-1]
    refused = launcher.run("gke.sh", *GPUS, *TRAIN, "--config.log.sample", 'a "b"')
    assert refused.returncode == 2 and 'a " or \\ in the command is not allowed with --gpu-type' in refused.stderr


@pytest.mark.parametrize("state", ["Admitted", "QuotaReserved", "Evicted"])
def test_a_second_launch_leaves_a_running_job_alone(launcher, state):
    launcher.answers("xpk workload list", TABLE.format("w", state))
    done = launcher.run("gke.sh", *JOB, *TRAIN)
    assert done.returncode == 2 and len(launcher.calls) == 1
    assert f"--workload=w: this job already exists ({state})" in done.stderr and "xpk workload delete" in done.stderr


def test_a_job_that_has_ended_is_replaced(launcher):
    launcher.answers("xpk workload list", TABLE.format("w", "Finished"))
    assert launcher.run("gke.sh", *JOB, *TRAIN).returncode == 0 and launcher.verbs == ["list", "delete", "create"]
    assert "--force" in launcher.calls[1]


def test_a_job_with_a_longer_name_is_another_one(launcher):
    launcher.answers("xpk workload list", TABLE.format("w-2", "Admitted"))
    assert launcher.run("gke.sh", *JOB, *TRAIN).returncode == 0 and launcher.verbs == ["list", "create"]


def test_xpk_has_no_terminal_to_ask_whether_to_delete(launcher):
    """It deletes a running job if it is answered with y."""
    program = launcher.folder / "bin" / "xpk"
    program.unlink()
    program.write_text("#!/bin/sh\n[ \"$1 $2\" != 'workload create' ] || { read -r answer; echo \"read '$answer'\"; }\n")
    program.chmod(0o755)
    script = ["bash", str(ROOT / "launch" / "gke.sh"), *JOB, *TRAIN]
    done = subprocess.run(script, input="y\n", env=launcher.environment, capture_output=True, text=True)
    assert done.stdout == "read ''\n"


def test_with_wait_the_exit_code_is_that_of_the_job(launcher):
    launcher.answers("wait-for-job-completion", ("", 125))
    assert launcher.run("gke.sh", *JOB, "--wait", *TRAIN).returncode == 125


@pytest.mark.parametrize("fails", ["xpk cluster create", "xpk workload list"])
def test_no_job_starts_if_the_cluster_cannot_be_created_or_asked(launcher, fails):
    launcher.answers(fails, ("", 1))
    assert launcher.run("gke.sh", *JOB, "--create", "spot", *TRAIN).returncode == 1
    assert launcher.verbs[-1] == fails.split()[-1]


def test_variables_are_named_in_a_file_and_their_values_stay_in_the_environment(launcher):
    """XPK reads a name without a value from its own environment."""
    program = launcher.folder / "bin" / "xpk"
    program.unlink()
    program.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" != --env-file ] || cat "$2"; shift; done\n')
    program.chmod(0o755)
    done = launcher.run("gke.sh", *JOB, "--env", "HF_TOKEN", *TRAIN, HF_TOKEN="secret")
    assert done.returncode == 0 and done.stdout == "JAX_PLATFORMS=tpu,cpu\nHF_TOKEN\n" and "secret" not in done.stderr


def test_the_image_has_the_name_of_its_commit(launcher):
    image = ["registry/x" if word == "registry/x:1" else word for word in JOB]
    launcher.run("gke.sh", *image, "--build", *TRAIN)
    (build,) = (call for call in launcher.calls if call[:2] == ["docker", "build"])
    (given,) = (word for word in build if word.startswith("COMMIT="))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert given.removeprefix("COMMIT=").removesuffix("-dirty") == head
    tag = build[build.index("--tag") + 1]
    assert tag.startswith(f"registry/x:{head[:12]}") and ("-" in tag) == given.endswith("-dirty")
    create = launcher.calls[-1]
    assert create[create.index("--docker-image") + 1] == tag
    refused = launcher.run("gke.sh", *JOB, "--build", *TRAIN)
    assert refused.returncode == 2 and "--image='registry/x:1' is not allowed with --build" in refused.stderr


def test_changed_files_have_another_name(tmp_path):
    def name() -> str:
        script = f"source {ROOT}/launch/common.sh; cd {tmp_path}; tree"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.strip()

    commit = "git init -q . && echo 1 > f && git add f && git -c user.name=n -c user.email=e commit -qm c"
    subprocess.run(["bash", "-c", commit], cwd=tmp_path, check=True)
    names = [name()]
    for file, text in (("f", "2"), ("f", "3"), ("new", "1"), ("new", "2")):
        (tmp_path / file).write_text(text)
        names.append(name())
    assert len(set(names)) == 5 and len(names[0]) == 12 and all(each.startswith(names[0] + "-") for each in names[1:])


def test_the_image_contains_the_files_of_the_manifest_and_the_scripts():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    sources = [word for words in copied for word in words]
    assert {"launch", "configs", "xfresearch", "requirements.txt", "requirements"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{source}" in ignored for source in sources)


def test_the_image_is_pinned_and_runs_as_root_only_for_tpus():
    text = (ROOT / "launch" / "Dockerfile").read_text()
    stages = {part.split("\n")[0].split(" AS ")[-1]: part for part in text.split("\nFROM ")[1:]}
    assert "@sha256:" in stages["code"].split("\n")[0] and 'RUN echo "$COMMIT" > COMMIT' in stages["code"]
    assert [name for name, part in stages.items() if "USER 1000" in part] == ["run_cuda12", "run_cuda13"]
    assert "run_tpu" in stages and "run_${JAX}" in stages  # of the --build-arg, so that no other name is built
