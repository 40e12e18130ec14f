"""Several processes train as one: the same batches and losses as a single process, after kills and preemption notices
too, and with other numbers of processes.

All tests use the command line on this machine's CPU, where the processes communicate through Gloo.
"""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.tolerances import TOLERANCE
from tests.training.processes import (
    HEARTBEAT,
    ROOT,
    Processes,
    copied_back_to,
    curve,
    digests,
    flags,
    free_port,
    handles,
    rows_written,
)
from tests.training.processes_worker import MESHES, STEPS, digest
from xfresearch.checkpoints import store
from xfresearch.checkpoints.digests import digests as array_digests
from xfresearch.data.pipeline import Batches, evaluation_batches, prepare
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import DIVERGED, TRANSIENT

LAST = 12
TWO = ["--config.mesh.fsdp=2", "--config.evaluation.batch_size=3"]  # a batch size that two processes do not divide


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def train(count: int, workdir, cache, *overrides: str, steps: int = LAST, by: str = "flags") -> Processes:
    return Processes(count, "xfresearch.train", f"--workdir={workdir}", *flags(cache, *overrides, steps=steps), by=by)


def losses(workdir, after: int = 0) -> dict:
    return {(row["step"], row["kind"]): row["loss"] for row in curve(workdir) if row["step"] > after}


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache):
    """A run of one process: this one, which has JAX already."""
    workdir = tmp_path_factory.mktemp("single")
    from xfresearch.train import main

    main([f"--workdir={workdir}", *flags(cache, steps=LAST)])
    return workdir


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of four processes that shard parameters and heads and start with an empty cache; and their outputs."""
    workdir, cold = tmp_path_factory.mktemp("four"), tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_COMPILATION_CACHE_DIR")  # else they share the programs of other tests
        ended = train(4, workdir, cold, "--config.mesh.fsdp=2", "--config.mesh.tensor=2").succeed()
    assert list((cold / "compiled").glob("jit_update*")), "compiled programs are cached"
    return workdir, ended


def test_every_process_reads_its_own_rows_of_the_same_batches(cache):
    ended = Processes(4, "tests.training.processes_worker", *flags(cache, steps=LAST), devices=2).succeed()
    listed = [json.loads(err[err.index("RESULT ") :].split(" ", 1)[1].splitlines()[0]) for _, _, err in ended]
    first, *others = flags(cache, steps=LAST)
    config = parse(["--config", first.removeprefix("--config="), *others])
    batches = [Batches(config).batch(step) for step in STEPS]
    batches += evaluation_batches(prepare(config, "validation"), config.batch_size, 2 * config.batch_size - 3)
    expected = [digest(batch) for batch in batches]
    rows = {
        name: [process["seen"][name]["rows"] for process in listed] for name in (json.dumps(mesh) for mesh in MESHES)
    }
    halves, whole = [[0, 1, 2, 3], [4, 5, 6, 7]], list(range(8))
    assert rows['{"data": -1}'] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows['{"fsdp": 2, "tensor": 4}'] == rows['{"data": 2, "context": 4}'] == [halves[0]] * 2 + [halves[1]] * 2
    assert rows['{"tensor": 4, "context": 2}'] == [whole] * 4
    for process in listed:
        for seen in process["seen"].values():
            assert seen["digests"] == expected
            assert seen["first"] == array_digests(batches[0])
            assert set(seen["read"]) == {len(seen["rows"])}
    assert [process["spread"] for process in listed] == [{"min": 1, "median": 3.5, "max": 5, "slowest_process": 1}] * 4
    assert listed[0]["errors"] == ["UserError: too wide: " + "é" * 50, "Stopped: disk full", "KeyError: 'lost'", "done"]
    failed = "Stopped: process 0 failed (trying): KeyError: 'lost'"
    assert [process["errors"][2] for process in listed[1:]] == [failed] * 3
    assert [process["errors"][:2] for process in listed[1:]] == [listed[0]["errors"][:2]] * 3
    other = "config.mesh.data: -1 -> 1; config.mesh.tensor: 1 -> 2; config.steps: 12 -> 99 (in process 3)"
    heard = ["None", f"every process needs the config of process 0: {other}", "None"]
    difference = "train split of a: 'same' -> 'other' (in process 3)"
    heard.append(f"every process needs the data, code and settings of process 0: {difference}")
    assert [process["mistaken"] for process in listed] == [heard] * 4
    assert [process["reach"] for process in listed] == [128] * 4  # 0.3 x 400 + 4, rounded up to a multiple of 64
    heard = listed[0]["damaged"]
    assert [process["damaged"] for process in listed] == [heard] * 4
    assert heard["whole"] == "read" and all(heard[what].endswith("(in process 1)") for what in ("params", "meta"))
    assert "meta does not have the digest" in heard["meta"]
    heard = ["", "params/w has values that are not finite", "", [1]]
    heard.append("checkpoint 3 is not good: no update was finite (in process 0)")
    assert [process["not good"] for process in listed] == [heard] * 4


@pytest.mark.long
def test_the_profile_window_is_written(cache, tmp_path):
    train(1, tmp_path, cache, "--config.log.profile_start=5", "--config.log.profile_steps=2").succeed()
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.long
@pytest.mark.parametrize("rate, reason", [(1e30, "the loss or gradient of step 2 (batch 1) is not finite"), (3e38, "after")])
def test_two_processes_that_diverge_end_with_the_same_reason(cache, tmp_path, rate, reason):
    """At the higher rate the first update makes parameters infinite."""
    overrides = [f"--config.optimizer.{key}" for key in (f"learning_rate={rate}", "warmup=1", "weight_decay=1e4")]
    overrides += ["--config.checkpoint.every=1", "--config.evaluation.every=0"]
    ended = train(2, tmp_path, cache, *TWO, *overrides).succeed(DIVERGED)
    assert reason in ended[0][2] and "there is no good checkpoint" in ended[0][2]
    assert store.steps(tmp_path) == [] and store.published(tmp_path) == ([1] if rate == 1e30 else [])


@pytest.mark.long
def test_four_processes_train_as_one_and_only_the_first_prints(single, four):
    workdir, ended = four
    assert losses(workdir) == pytest.approx(losses(single), rel=TOLERANCE["float32"])
    assert "report" in ended[0][1] and (workdir / "report.html").exists()
    for _, out, err in ended[1:]:
        assert not out and not err
    assert all(line.startswith("[process 0] ") for line in ended[0][2].splitlines())
    assert not (workdir / "errors").exists()


@pytest.mark.long
def test_one_process_resumes_from_a_checkpoint_of_four(single, four, cache, tmp_path):
    workdir = copied_back_to(4, four[0], tmp_path / "run")
    train(1, workdir, cache).succeed()  # verifies the digests that four processes wrote
    assert losses(workdir, 4) == pytest.approx(losses(single, 4), rel=TOLERANCE["float32"])


@pytest.fixture(scope="module")
def two(tmp_path_factory, single, cache):
    """A run of two processes that resumes from the checkpoint of a single one."""
    workdir = copied_back_to(4, single, tmp_path_factory.mktemp("two") / "run")
    train(2, workdir, cache, *TWO).succeed()
    return workdir


def test_two_processes_resume_from_a_checkpoint_of_one(single, two):
    assert losses(two, 4) == pytest.approx(losses(single, 4), rel=TOLERANCE["float32"])


@pytest.mark.long
def test_two_processes_evaluate_as_one(two, tmp_path):
    from xfresearch import evaluate

    flags = [f"--workdir={two}", "--limit=13", "--batch-size=3"]
    ended = Processes(2, "xfresearch.evaluate", *flags, f"--json={tmp_path}/two.json").succeed()
    assert "bits/byte" in ended[0][1] and not ended[1][1] + ended[1][2]
    evaluate.main([*flags, f"--json={tmp_path}/one.json"])
    figures = [json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json")]
    one, both = [{k: v for k, v in f.items() if k != "tokens_per_second"} for f in figures]
    assert both.pop("loss") == pytest.approx(one.pop("loss"), rel=TOLERANCE["float32"])
    assert {k: v for k, v in both.items() if isinstance(v, int | str)} == {
        k: v for k, v in one.items() if isinstance(v, int | str)
    }


def stopped_by_a_signal(index: int, count: int, workdir, cache, *overrides, when, number=signal.SIGTERM, **kwargs):
    """Sends a signal to one process of a run when `when()` is true. Returns the step at which all of them stop."""
    with train(count, workdir, cache, *overrides, **kwargs) as processes:
        processes.until(lambda: when() and handles(signal.SIGTERM, processes[index]))
        processes[index].send_signal(number)
        ended = processes.succeed(128 + signal.SIGTERM)
    step = store.steps(workdir)[-1]
    assert f"[process 0] SIGTERM: saved step {step}; the same command resumes from there" in ended[0][2]
    assert not (workdir / "errors").exists()
    return step


def killed(index: int, count: int, workdir, cache, *overrides, rows: int, **kwargs) -> None:
    """Kills one process of a run after `rows` more rows. The others must report it and end in time."""
    before = rows_written(workdir)
    with train(count, workdir, cache, *overrides, **kwargs) as processes:
        processes.until(lambda: rows_written(workdir) >= before + rows)
        processes[index].kill()
        began = time.time()
        ended = processes.finish()
        took = time.time() - began
    assert took < HEARTBEAT + 15
    saved = store.steps(workdir)[-1]
    for number, (code, _, err) in enumerate(ended):
        last = err.splitlines()[-1]
        assert code != 0
        assert (workdir / "errors" / f"process-{number}.log").exists()
        if number == index:
            assert last.startswith(f"[process {index}] stopped: process {index} of {count} was killed or crashed")
        else:
            lost = f"[process {number}] stopped: process {index} of {count} is lost; the same command resumes from "
            assert last.startswith(f"{lost}step {saved} "), err[-3000:]


@pytest.mark.long
def test_two_processes_stopped_then_killed_end_bit_for_bit_like_the_uninterrupted_run(single, two, cache, tmp_path):
    workdir = copied_back_to(4, single, tmp_path / "run")
    begun = (workdir / "run.json").stat().st_mtime
    early = {"when": lambda: (workdir / "run.json").stat().st_mtime > begun}  # while the step is compiled
    assert 4 < stopped_by_a_signal(1, 2, workdir, cache, *TWO, **early) < LAST
    killed(1, 2, workdir, cache, *TWO, rows=2)
    ended = train(2, workdir, cache, *TWO, f"--json={tmp_path}/results.json").succeed()
    assert digests(workdir, LAST) == digests(two, LAST)
    assert curve(workdir) == curve(two)
    assert_all_time_is_accounted_for(workdir, json.loads((tmp_path / "results.json").read_text()))
    assert "goodput" in ended[0][1] and "4 starts" in ended[0][1]


def assert_all_time_is_accounted_for(workdir, results: dict) -> None:
    """From the first start on: steps of the killed processes, time between processes, and all measured time."""
    first = json.loads((workdir / "run.json").read_text())["starts"][0]["seconds"]
    last_row = (workdir / "metrics.jsonl").stat().st_mtime
    assert last_row - first - 2 < results["wall_seconds"] < time.time() - first
    assert results["time"]["lost"] > 0 and results["time"]["down"] > 0 and results["starts"] == 4
    assert results["goodput"] == results["time"]["step"] and sum(results["time"].values()) == pytest.approx(1)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("index", range(4))
def test_a_signal_to_any_of_four_processes_stops_all_at_one_step(cache, tmp_path, index, number):
    middle = {"when": lambda: rows_written(tmp_path) >= 5}
    step = stopped_by_a_signal(index, 4, tmp_path, cache, **middle, number=number, steps=400)
    assert [row["step"] for row in curve(tmp_path) if row["kind"] == "train"] == list(range(1, step + 1))


@pytest.mark.long
@pytest.mark.parametrize("index", range(4))
def test_killing_any_of_four_processes_ends_all(cache, tmp_path, index):
    killed(index, 4, tmp_path, cache, rows=9, steps=400)


def test_mistakes_are_one_line_in_every_process(single, cache):
    """Only process 0 sees that the directory belongs to another run, and all end. JAX detects the launcher here."""
    with train(2, single, cache, "--config.optimizer.learning_rate=0.5", by="slurm") as processes:
        began = time.time()
        ended = processes.finish()
    for number, (code, _, err) in enumerate(ended):
        assert code == 2, err
        assert err.splitlines()[-1].startswith(f"[process {number}] error: --workdir={single} holds a run of another")
    assert time.time() - began < 60


PREEMPTED = """
import os, signal, sys, time
from jax.experimental.multihost_utils import reached_preemption_sync_point
from xfresearch.runtime import command
from xfresearch.runtime import distributed
parser = command.Parser()
distributed.add_flags(parser)
workdir = sys.argv[2]
with distributed.joined(parser.parse_args(sys.argv[3:]), workdir):
    distributed._job = distributed.Job(0, 1, 6, workdir, None)  # a single process that acts as one of several
    if sys.argv[1] != "never":
        distributed.handle_preemption(True)
        os.kill(os.getpid(), signal.SIGTERM)
        asked = 0
        while not reached_preemption_sync_point(asked):
            asked += 1
            time.sleep(0.05)
        print("noted", flush=True)
        distributed.handle_preemption(False)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


@pytest.mark.parametrize("handled", ["never", "for a time"])
def test_sigterm_ends_a_process_outside_the_loop_and_is_a_notice_in_it(handled, tmp_path):
    one = [str(tmp_path), f"--coordinator=localhost:{free_port()}", "--processes=1", "--process=0"]
    done = subprocess.run(
        [sys.executable, "-c", PREEMPTED, handled, *one], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == ("" if handled == "never" else "noted\n")


@pytest.mark.parametrize(
    "given, words",
    [
        ("--processes=2 --process=0", "--coordinator is missing"),
        ("--coordinator=here:1", "--processes is missing"),
        ("--coordinator=here --processes=2 --process=0", "--coordinator=here.* HOST:PORT"),
        ("--coordinator=here:1 --processes=2 --process=2", "--process=2.* from 0 to 1"),
        ("--coordinator=here:1 --processes=0 --process=0", "--processes=0"),
        ("--coordinator=here:1 --processes=2 --process=0 --distributed=off", "--distributed=off"),
        ("--heartbeat=1", "--heartbeat=1"),
        ("--join-timeout=0", "--join-timeout=0"),
    ],
)
def test_incomplete_or_wrong_flags_are_refused_by_name(given, words):
    from xfresearch.runtime import command, distributed
    from xfresearch.runtime.errors import UserError

    parser = command.Parser()
    distributed.add_flags(parser)
    with pytest.raises(UserError, match=words):
        distributed.check(parser.parse_args(given.split()))


@pytest.mark.parametrize("index", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_process_that_never_comes_is_one_line(index, tmp_path):
    one = [f"--coordinator=localhost:{free_port()}", "--processes=2", f"--process={index}", "--join-timeout=3"]
    command = [sys.executable, "-m", "xfresearch.train", f"--config={ROOT}/configs/gpt2.py:tiny", f"--workdir={tmp_path}"]
    done = subprocess.run([*command, *one], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == TRANSIENT
    assert done.stderr == f"stopped: not all processes came at {one[0]} within --join-timeout=3 seconds\n"


def test_a_port_that_is_taken_is_refused(tmp_path):
    from xfresearch.runtime import command, distributed
    from xfresearch.runtime.errors import UserError

    parser = command.Parser()
    distributed.add_flags(parser)
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        options = parser.parse_args([f"--coordinator=localhost:{port}", "--processes=2", "--process=0"])
        with pytest.raises(UserError, match=f"--coordinator=localhost:{port}: process 0 cannot listen at that port"):
            distributed.joined(options, str(tmp_path)).__enter__()
