"""launch/tpu_vm.sh with stand-ins: its calls without failures, and after preemptions."""

import os
import shlex
import signal
import time

import pytest

from tests.launch.stand_ins import TPUS

RUN = shlex.split("--name run1 --zone europe-west4-b --accelerator v6e-16 --spot --poll 0")
TRAIN = shlex.split(
    "-- python -m xfresearch.train --config configs/llama.py --workdir gs://bucket/run --config.mesh.fsdp=8"
)
CALLS = ["list", "create", "list", "nodes", "scp", "ssh", "ssh", "list", "nodes", "delete"]


@pytest.mark.parametrize(
    "options",
    ["", "--slices 4", "--project p --service-account me@p.iam.gserviceaccount.com --runtime r --network n", "--keep"],
)
def test_a_dry_run_prints_the_commands_of_a_real_run(launcher, options):
    arguments = [*RUN, *options.split(), *TRAIN]
    dry = launcher.run("tpu_vm.sh", "--dry-run", *arguments)
    assert dry.returncode == 0 and launcher.calls == []
    real = launcher.run("tpu_vm.sh", *arguments)
    assert real.returncode == 0, real.stderr
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [words for words in printed if words[0] == "gcloud"] == launcher.calls
    assert launcher.verbs == CALLS[: len(CALLS) - ("--keep" in options)]


def test_commands_of_one_process_need_one_host(launcher):
    job = ["--", "python", "-m", "xfresearch.study", "--config", "configs/studies/w_o.py", "--workdir", "gs://b/s"]
    refused = launcher.run("tpu_vm.sh", *RUN, *job)
    assert "xfresearch.study is not allowed here: it runs as one process, on one host" in refused.stderr
    assert refused.returncode == 2 and launcher.calls == []
    one = ["v6e-8" if word == "v6e-16" else word for word in RUN]
    assert launcher.run("tpu_vm.sh", "--dry-run", *one, *job).returncode == 0


def test_node_flags_of_one_slice_and_of_several(launcher):
    launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    launcher.run("tpu_vm.sh", *RUN, "--slices", "2", *TRAIN)
    one, two = (call for call in launcher.calls if call[4] == "create")
    assert "--node-id run1 --spot" in " ".join(one)
    assert "--node-count 2 --node-prefix run1 --spot" in " ".join(two)


@pytest.mark.parametrize(
    "accelerator, runtime",
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5p-128", "v2-alpha-tpuv5"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-256", "v2-alpha-tpuv6e"),
    ],
)
def test_each_generation_has_its_software_version(launcher, accelerator, runtime):
    done = launcher.run("tpu_vm.sh", *RUN, "--accelerator", accelerator, "--dry-run", *TRAIN)
    assert f"--accelerator-type {accelerator} --runtime-version {runtime} " in done.stdout


def test_the_job_reaches_every_host_at_once_and_unchanged(launcher):
    text = 'it\'s "quoted" $HOME'
    launcher.run(
        "tpu_vm.sh", *RUN, "--", "python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", "--data", text
    )
    install, job = (call for call in launcher.calls if call[4] == "ssh")
    assert {"--worker=all", "--node=all", "--batch-size=all"} <= set(job)
    words = shlex.split(job[job.index("--command") + 1])
    assert words[-7:] == ["python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", "--data", text]
    assert "requirements-cloud.txt" in install[-1] and "jax[tpu]" in install[-1]


def test_it_waits_until_the_machines_are_active(launcher):
    launcher.answers(f"{TPUS} list", "", "WAITING_FOR_RESOURCES", "PROVISIONING", ("", 1), "ACTIVE", "ACTIVE")
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 0 and launcher.verbs == CALLS[:2] + ["list"] * 3 + CALLS[2:]
    assert "run1 is PROVISIONING" in done.stderr


@pytest.mark.parametrize("code", [0, 143, 255], ids=lambda code: f"exit-{code}")
def test_preempted_machines_are_requested_again(launcher, code):
    launcher.answers(f"{TPUS} list", "", "ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE", "ACTIVE")
    launcher.answers(f"{TPUS} ssh", "", ("", code))
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 0, done.stderr
    assert launcher.verbs == CALLS[:-2] + ["list", "delete", *CALLS[1:]]


def test_a_preempted_node_counts_before_the_queued_resource_reports_it(launcher):
    launcher.answers("tpu-vm list", "READY\nREADY", "READY\nPREEMPTED", "READY\nPREEMPTED")
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 0 and "the queued resource is PREEMPTED" in done.stderr
    assert launcher.verbs == CALLS[:-1] + ["list", "nodes", "delete", *CALLS[1:]]


def test_after_a_lost_connection_the_same_machines_are_used(launcher):
    launcher.answers(f"{TPUS} ssh", "", ("", 255))
    assert launcher.run("tpu_vm.sh", *RUN, *TRAIN).returncode == 0
    assert launcher.verbs.count("create") == launcher.verbs.count("delete") == 1
    assert launcher.verbs.count("ssh") == 4


def test_a_gcloud_that_fails_on_the_first_call_is_not_retried(launcher):
    launcher.answers(f"{TPUS} list", *[("", 1)] * 9)
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 1 and launcher.verbs == ["list"] and "gcloud failed: giving up" in done.stderr


def test_machines_are_not_deleted_because_gcloud_fails(launcher):
    launcher.answers(f"{TPUS} list", "", "ACTIVE", *[("", 1)] * 9)
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("create") == 1 and "delete" not in launcher.verbs
    assert "gcloud failed 5 times; the machines are not deleted" in done.stderr


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_it_gives_up_after_the_retries(launcher, state):
    launcher.answers(f"{TPUS} list", "", *[state] * 99)
    done = launcher.run("tpu_vm.sh", *RUN, "--retries", "2", *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("create") == 3 and launcher.verbs[-1] == "delete"
    assert done.stderr.strip().splitlines()[-2].endswith(f"is {state}, all --retries=2 used: giving up")


def test_a_failing_job_is_not_retried_forever(launcher):
    launcher.answers("detached", *[("", 1)] * 99)
    done = launcher.run("tpu_vm.sh", *RUN, "--retries", "1", *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("create") == 1 and launcher.verbs.count("ssh") == 4


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_or_a_loss_that_is_not_finite_is_not_retried(launcher, code):
    launcher.answers("detached", ("", code))
    assert launcher.run("tpu_vm.sh", *RUN, *TRAIN).returncode == code
    assert launcher.verbs == CALLS[:-3] + ["delete"]


def test_existing_machines_are_not_used_without_attach(launcher):
    launcher.answers(f"{TPUS} list", "ACTIVE")
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 2 and launcher.verbs == ["list", "nodes"] and "--attach" in done.stderr


def test_attach_uses_existing_machines(launcher):
    launcher.answers(f"{TPUS} list", "ACTIVE", "ACTIVE", "ACTIVE")
    dry = launcher.run("tpu_vm.sh", *RUN, "--attach", "--dry-run", *TRAIN)
    assert launcher.run("tpu_vm.sh", *RUN, "--attach", *TRAIN).returncode == 0
    assert launcher.verbs == ["list", "nodes", *CALLS[2:]]
    assert [shlex.split(line) for line in dry.stdout.splitlines() if line.startswith("gcloud")] == launcher.calls


def test_machines_on_which_another_command_runs_are_not_deleted(launcher):
    launcher.answers(f"{TPUS} list", "ACTIVE", "ACTIVE")
    launcher.answers("detached", ("", 4))
    done = launcher.run("tpu_vm.sh", *RUN, "--attach", *TRAIN)
    assert done.returncode == 2 and "delete" not in launcher.verbs and "another command" in done.stderr


def test_machines_that_somebody_deleted_are_not_requested_again(launcher):
    launcher.answers(f"{TPUS} list", "", "ACTIVE", "", "")
    launcher.answers("detached", ("", 255))
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("create") == 1 and "somebody deleted it" in done.stderr


def test_ctrl_c_deletes_the_machines(launcher):
    launcher.answers("detached", ("", 0, 60.0))
    process = launcher.start("tpu_vm.sh", *RUN, *TRAIN)
    deadline = time.monotonic() + 30
    while launcher.verbs.count("ssh") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
    process.communicate(timeout=20)
    assert process.returncode == 130 and launcher.verbs[-1] == "delete"
