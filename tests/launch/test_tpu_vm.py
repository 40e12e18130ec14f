"""launch/tpu_vm.sh with stand-ins: its calls without failures, and after preemptions."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.stand_ins import ROOT, TPUS, WORDS, words_of

RUN = shlex.split("--name run1 --zone europe-west4-b --accelerator v6e-16 --spot --poll 0")
TRAIN = shlex.split("-- python -m xfresearch.train --config configs/llama.py --workdir gs://bucket/run --config.mesh.fsdp=8")
CALLS = ["list", "create", "list", "nodes", "scp", "ssh", "ssh", "list", "nodes", "delete"]
SAVED = "ls"  # looks whether the run has saved since it was asked before


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--slices 4 --keep",
        "--project p --service-account me@p.iam.gserviceaccount.com --runtime r --network n --subnetwork s --iap",
    ],
)
def test_a_dry_run_prints_the_commands_of_a_real_run(launcher, options):
    arguments = [*RUN, *options.split(), *TRAIN]
    dry = launcher.run("tpu_vm.sh", "--dry-run", *arguments)
    assert dry.returncode == 0 and launcher.calls == []
    real = launcher.run("tpu_vm.sh", *arguments)
    assert real.returncode == 0, real.stderr
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [words for words in printed if words[0] == "gcloud"] == launcher.calls, real.stderr
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
    given = ["python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", *WORDS.values()]
    launcher.run("tpu_vm.sh", *RUN, "--", *given)
    install, job = (call for call in launcher.calls if call[4] == "ssh")
    assert {"--worker=all", "--node=all", "--batch-size=all"} <= set(job)
    assert {"--ssh-flag=-oServerAliveInterval=15", "--ssh-flag=-oServerAliveCountMax=4"} <= set(job)
    _, _, command = job[job.index("--command") + 1].partition(" bash launch/detached.sh ")
    assert words_of(command)[1:] == ["env", "JAX_PLATFORMS=tpu,cpu", *given]
    assert "requirements/cloud.txt" in install[-1] and "jax[tpu]" in install[-1]


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
    assert launcher.verbs == CALLS[:-2] + ["list", SAVED, "delete", *CALLS[1:]]


def test_a_preempted_node_counts_before_the_queued_resource_reports_it(launcher):
    launcher.answers("tpu-vm list", "READY\nREADY", "READY\nPREEMPTED", "READY\nPREEMPTED")
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 0 and "the machines are PREEMPTED (1 of --preemptions=100)" in done.stderr
    assert launcher.verbs == CALLS[:-1] + ["list", "nodes", SAVED, "delete", *CALLS[1:]]


def test_nodes_of_another_queued_resource_are_not_looked_at(launcher):
    """`llama-2` has nodes llama-2-0 and llama-2-1; a resource `llama` of three slices has llama-0 to llama-2."""
    launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    (asked, *_) = (call for call in launcher.calls if call[3] == "tpu-vm")
    assert asked[asked.index("tpu-vm") + 4] == "--filter=queuedResource~/run1$"


@pytest.mark.parametrize("node", ["REPAIRING\t", "READY\tUNHEALTHY_MAINTENANCE", "RESTARTING\tHEALTHY"])
def test_repairs_and_maintenance_are_waited_for_and_do_not_count(launcher, node):
    launcher.answers("tpu-vm list", "READY\tHEALTHY", *[f"READY\tHEALTHY\n{node}"] * 3)
    launcher.answers("detached", ("", 255))
    done = launcher.run("tpu_vm.sh", *RUN, "--retries", "0", "--preemptions", "0", *TRAIN)
    assert done.returncode == 0 and launcher.verbs.count("create") == launcher.verbs.count("delete") == 1, done.stderr


def test_counts_begin_again_when_the_run_has_saved(launcher):
    launcher.answers("storage ls", *[f"gs://bucket/run/checkpoints/{step}/" for step in (0, 1, 2)], "", "")
    launcher.answers("detached", *[("", 1)] * 9)
    done = launcher.run("tpu_vm.sh", *RUN, "--retries", "1", *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("ssh") == 2 * 4  # three runs that saved, and one retry


def test_preemptions_and_failures_are_counted_apart(launcher):
    launcher.answers(f"{TPUS} list", "", *["ACTIVE", "SUSPENDED", "SUSPENDED"] * 2, "ACTIVE", "ACTIVE")
    launcher.answers("detached", ("", 143), ("", 143), ("", 1))
    done = launcher.run("tpu_vm.sh", *RUN, "--retries", "1", "--preemptions", "2", *TRAIN)
    assert done.returncode == 0 and "(1 of --retries=1)" in done.stderr and "(2 of --preemptions=2)" in done.stderr


def test_the_reason_of_a_failed_request_is_printed_and_one_that_stays_is_final(launcher):
    launcher.answers(f"{TPUS} list", "", "FAILED\tQuota exceeded for v6e", "FAILED\tQuota exceeded for v6e")
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 1 and launcher.verbs == ["list", "create", "list", "delete"]
    assert "the request failed in europe-west4-b: Quota exceeded for v6e: giving up" in done.stderr
    assert done.stderr.splitlines()[-1] == "[launch] nothing is left that costs money"


def test_a_zone_without_machines_is_left_after_a_while(launcher):
    launcher.answers(f"{TPUS} list", "", "", "WAITING_FOR_RESOURCES")
    zones = ["europe-west4-b,us-east5-a" if word == "europe-west4-b" else word for word in RUN]
    done = launcher.run("tpu_vm.sh", *zones, "--zone-wait", "0", *TRAIN)
    assert done.returncode == 0 and "no machines in europe-west4-b after 0 s; trying us-east5-a" in done.stderr
    places = [call[call.index("--zone") + 1] for call in launcher.calls if call[4:5] in (["create"], ["delete"])]
    assert places == ["europe-west4-b", "europe-west4-b", "us-east5-a", "us-east5-a"]


def test_a_machine_in_a_later_zone_is_found(launcher):
    (launcher.folder / "active-us-east5-a").touch()
    zones = ["europe-west4-b,us-east5-a" if word == "europe-west4-b" else word for word in RUN]
    done = launcher.run("tpu_vm.sh", *zones, *TRAIN)
    assert done.returncode == 2 and "already exists in us-east5-a (ACTIVE)" in done.stderr


def test_variables_travel_in_a_file_that_only_the_user_can_read(launcher):
    launcher.answers("scp", ("", 0, 0))
    done = launcher.run("tpu_vm.sh", *RUN, "--env", "HF_TOKEN,OTHER", *TRAIN, HF_TOKEN="a 'secret'", OTHER="x")
    assert done.returncode == 0 and "secret" not in done.stdout + done.stderr + str(launcher.calls)
    (sent,) = (call for call in launcher.calls if call[4] == "scp")
    assert {"FOLDER/xfresearch.tar.gz", "FOLDER/xfresearch.env"} <= set(sent)
    install, job = (call[-1] for call in launcher.calls if call[4] == "ssh")
    assert install.startswith("chmod 600 xfresearch.env && ") and "set -a && . ~/xfresearch.env && set +a && PATH=" in job
    refused = launcher.run("tpu_vm.sh", *RUN, "--env", "HF_TOKEN,NOT_SET_HERE", *TRAIN, HF_TOKEN="x")
    assert refused.returncode == 2 and "the variable NOT_SET_HERE is not set" in refused.stderr
    assert not list(launcher.folder.glob("xfresearch-*"))


def test_values_are_read_back_as_they_were(launcher, tmp_path):
    script = f"source {ROOT}/launch/common.sh; declare -A option=([env]=A,B [dry-run]=no); write_variables {tmp_path}/f"
    values = {"A": 'it\'s "$HOME" \\ *', "B": "two\nlines"}
    subprocess.run(["bash", "-c", script], env=os.environ | values, check=True)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    read = [
        "bash",
        "-c",
        f"set -a; . {tmp_path}/f; exec {sys.executable} -c \"import os; print([os.environ[k] for k in 'AB'])\"",
    ]
    assert subprocess.run(read, capture_output=True, text=True).stdout.strip() == str(list(values.values()))


def test_tasks_install_what_they_need(launcher):
    job = ["--", "python", "-m", "xfresearch.evaluate", "--workdir", "gs://b/r", "--tasks", "lambada"]
    done = launcher.run("tpu_vm.sh", "--dry-run", *RUN, *job)
    assert "-r requirements.txt -r requirements/cloud.txt -r requirements/eval.txt -c requirements/lock.txt" in done.stdout


def test_after_a_lost_connection_the_same_machines_are_used(launcher):
    launcher.answers(f"{TPUS} ssh", "", ("", 255))
    assert launcher.run("tpu_vm.sh", *RUN, *TRAIN).returncode == 0
    assert launcher.verbs.count("create") == launcher.verbs.count("delete") == 1
    assert launcher.verbs.count("ssh") == 4


def test_a_gcloud_that_fails_on_the_first_call_is_not_retried(launcher):
    launcher.answers(f"{TPUS} list", *[("", 1)] * 9)
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 1 and launcher.verbs == ["list"] and "gcloud failed in europe-west4-b" in done.stderr
    asked = "gcloud compute tpus queued-resources list --zone europe-west4-b"
    end = f"whether run1 exists in europe-west4-b, and costs money, is not known: {asked} '--filter=name~/run1$' shows it"
    assert done.stderr.splitlines()[-1] == f"[launch] {end}" and "nothing is left" not in done.stderr


def test_sigterm_to_the_script_alone_is_obeyed_while_ssh_waits(launcher):
    launcher.answers("detached", ("", 0, 60))
    process = launcher.start("tpu_vm.sh", *RUN, *TRAIN)
    deadline = time.monotonic() + 30
    while launcher.verbs.count("ssh") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143 and launcher.verbs[-1] == "delete"


def test_machines_are_not_deleted_because_gcloud_fails(launcher):
    launcher.answers(f"{TPUS} list", "", "ACTIVE", *[("", 1)] * 9)
    done = launcher.run("tpu_vm.sh", *RUN, *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("create") == 1 and "delete" not in launcher.verbs
    assert "gcloud failed 5 times" in done.stderr and "no machines are deleted" in done.stderr
    assert "run1 in europe-west4-b costs money: gcloud" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("state", "option"), [("SUSPENDED", "preemptions"), ("FAILED", "retries")])
def test_it_gives_up_after_the_retries(launcher, state, option):
    launcher.answers(f"{TPUS} list", "", *[state] * 99)
    done = launcher.run("tpu_vm.sh", *RUN, f"--{option}", "2", *TRAIN)
    assert done.returncode == 1 and launcher.verbs.count("create") == launcher.verbs.count("delete") == 3
    assert any(line.endswith(f"all --{option}=2 used: giving up") for line in done.stderr.splitlines())


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
    assert not list(launcher.folder.glob("xfresearch-*"))


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


@pytest.mark.parametrize(("number", "deleted"), [("SIGINT", True), ("SIGHUP", False)])
def test_ctrl_c_deletes_the_machines_and_a_closed_terminal_does_not(launcher, number, deleted):
    launcher.answers("detached", ("", 0, 60))
    process = launcher.start("tpu_vm.sh", *RUN, *TRAIN)
    deadline = time.monotonic() + 30
    while launcher.verbs.count("ssh") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.Signals[number])  # as a terminal does
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.Signals[number] and ("delete" in launcher.verbs) == deleted
    assert not list(launcher.folder.glob("xfresearch-*"))


def test_a_deletion_that_fails_is_tried_again_and_said(launcher):
    launcher.answers("queued-resources delete", *[("", 1)] * 4)
    assert launcher.run("tpu_vm.sh", *RUN, *TRAIN).returncode == 0 and launcher.verbs[-5:] == ["delete"] * 5
