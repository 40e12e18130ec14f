"""launch/slurm.sbatch with stand-ins, outside and inside a job; launch/multi_gpu.sh."""

import shlex
import subprocess

import pytest

from tests.launch.stand_ins import ROOT, WORDS

TRAIN = shlex.split("python -m xfresearch.train --config configs/llama.py --workdir /shared/run")
STUDY = shlex.split("python -m xfresearch.study --config configs/studies/w_o.py --workdir /shared/w_o --job auto")
INSIDE = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    "options, job",
    [
        ("", TRAIN),
        ("--array 0-9 --gpus-per-node 1", STUDY),
        ("--array 0,3,7-9:2%8 --gpus-per-node 1 --mem 0 --qos high --grace 300", STUDY),
        ("--nodes 2 --container registry/x:1 --mounts /data:/data,/scratch:/s --mem 200G", TRAIN),
        ("--nodes 4 --gpus-per-node 4 --cpus-per-task 12 --time 24:00:00 --partition a --account b --name c", TRAIN),
    ],
)
def test_a_dry_run_prints_the_submission_and_the_command_of_the_job(launcher, options, job):
    dry = launcher.run("slurm.sbatch", *options.split(), "--dry-run", "--", *job)
    assert dry.returncode == 0 and launcher.calls == []
    submission, steps = (shlex.split(line) for line in dry.stdout.splitlines())
    assert launcher.run("slurm.sbatch", *options.split(), "--", *job).returncode == 0
    assert launcher.calls == [submission]
    words = submission[submission.index("launch/slurm.sbatch") + 1 :]  # the arguments of the script inside the job
    assert launcher.run("slurm.sbatch", *words, SLURM_JOB_ID="7").returncode == 0
    assert launcher.calls == [submission, steps]


def test_limits_and_logs_of_a_submission(launcher):
    launcher.run("slurm.sbatch", "--array", "0-99%8", "--gpus-per-node", "1", "--grace", "300", "--", *STUDY)
    launcher.run("slurm.sbatch", "--container", "r/x:1", "--mounts", "/data:/data", "--", *TRAIN)
    array, plain = launcher.calls
    values = dict(zip(array, array[1:], strict=False))
    assert (values["--array"], values["--output"], values["--signal"]) == ("0-99%8", "xfresearch-%A_%a.log", "TERM@300")
    assert "TERM@120" in plain and "xfresearch-%j.log" in plain
    inside = plain[plain.index("launch/slurm.sbatch") + 1 :]
    launcher.run("slurm.sbatch", *inside, SLURM_JOB_ID="7")
    srun = launcher.calls[-1]
    assert srun[srun.index("--container-mounts") + 1] == f"{ROOT}:{ROOT},/data:/data"
    assert srun[srun.index("--container-workdir") + 1] == str(ROOT)


def test_every_word_of_a_command_reaches_slurm_and_docker_as_it_is(launcher):
    job = [*TRAIN[:-1], "runs/a", *WORDS.values()]
    for script, environment in (("slurm.sbatch", {}), ("slurm.sbatch", INSIDE), ("multi_gpu.sh --image x:1", {})):
        done = launcher.run(*script.split(), "--", *job, **environment)
        assert done.returncode == 0 and launcher.calls[-1][-len(job) :] == job, done.stderr


def test_a_command_of_one_process_is_not_started_several_times(launcher):
    refused = launcher.run("slurm.sbatch", "--array", "0-2", "--", *STUDY)
    assert refused.returncode == 2 and launcher.calls == []
    assert "xfresearch.study is not allowed here: it runs as one process, on one host (on Slurm with" in refused.stderr
    assert launcher.run("slurm.sbatch", "--array", "0-2", "--gpus-per-node", "1", "--", *STUDY).returncode == 0


@pytest.mark.parametrize("gpus, tasks, platforms", [("8", "16", "cuda,cpu"), ("4", "8", "cuda,cpu"), ("0", "2", "cpu")])
def test_one_process_per_gpu_or_per_node(launcher, gpus, tasks, platforms):
    launcher.run("slurm.sbatch", "--gpus-per-node", gpus, "--", *TRAIN, **INSIDE)
    (call,) = launcher.calls
    assert call[call.index("--ntasks") + 1] == tasks and f"JAX_PLATFORMS={platforms}" in call
    assert call[-len(TRAIN) - 2 :] == ["bash", "launch/entrypoint.sh", *TRAIN]
    assert not {"--gpus-per-task", "--gpu-bind"} & set(call)


@pytest.mark.parametrize(
    "code, restarts, requeued",
    [(143, "0", True), (75, "0", True), (134, "0", True), (137, "0", True), (143, "10", False), (0, "0", False)]
    + [(code, "0", False) for code in (1, 2, 3)],
)
def test_a_job_that_was_stopped_or_lost_a_process_is_requeued(launcher, code, restarts, requeued):
    launcher.answers("srun", ("", code))
    done = launcher.run("slurm.sbatch", "--", *TRAIN, **INSIDE, SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code
    assert (["scontrol", "requeue", "7"] in launcher.calls) == requeued


def test_a_task_of_an_array_requeues_itself_alone(launcher):
    launcher.answers("srun", ("", 143))
    launcher.run("slurm.sbatch", "--", *TRAIN, **INSIDE, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert launcher.calls[-1] == ["scontrol", "requeue", "7_3"]


def test_the_copy_that_slurm_runs_finds_the_checkout(launcher, tmp_path):
    copy = tmp_path / "slurm_script"
    copy.write_text((ROOT / "launch" / "slurm.sbatch").read_text())
    done = subprocess.run(
        ["bash", str(copy), "--", *TRAIN],
        cwd=ROOT,
        env={**launcher.environment, **INSIDE},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert launcher.calls[0][0] == "srun"


def test_the_process_sees_only_the_selected_gpus(launcher, tmp_path):
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['JAX_PLATFORMS'])"
    done = launcher.run("multi_gpu.sh", "--gpus", "0,3", "--", "python", "-c", show)
    assert done.stdout == "0,3 cuda,cpu\n"
    assert launcher.run("multi_gpu.sh", "--", "python", "-c", "raise SystemExit(7)").returncode == 7


def test_a_signal_to_the_script_reaches_the_command(launcher):
    """The command replaces the script."""
    script = ["bash", "launch/multi_gpu.sh", "--", "python", "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(script, cwd=ROOT, env=launcher.environment, stdout=subprocess.PIPE, text=True) as process:
        assert int(process.communicate()[0]) == process.pid


def test_gpus_in_a_container(launcher):
    job = [*TRAIN[:-1], "runs/a"]
    arguments = ["--image", "x:1", "--gpus", "0,3", "--", *job]
    dry = launcher.run("multi_gpu.sh", "--dry-run", *arguments)
    assert launcher.run("multi_gpu.sh", *arguments).returncode == 0
    assert launcher.calls == [shlex.split(dry.stdout)]
    assert "--env=CUDA_VISIBLE_DEVICES=0,3" in launcher.calls[0] and launcher.calls[0][-len(job) :] == job
