"""Runs that are killed, stopped, damaged, forked or moved resume exactly. All tests use the command line.

Every day, test_stopping.py stops runs, tests/studies kills them, test_checkpoint.py damages checkpoints, test_loop.py forks,
test_processes.py changes the mesh, and tests/faults makes the disk fail.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.processes import curve, digests, rows_written
from xfresearch.checkpoints import store
from xfresearch.runtime import errors

pytestmark = pytest.mark.long
ROOT = Path(__file__).parent.parent.parent
STEPS = 60


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def command(workdir, cache, *overrides, config="configs/moe.py:tiny"):
    """A small run with everything that resume must restore: averaged weights, dropout, evaluation, background saves."""
    keys = {
        "steps": STEPS,
        "checkpoint.every": 9,
        "checkpoint.keep": 3,
        "evaluation.every": 40,
        "evaluation.final_sequences": 8,
        "evaluation.sequences": 8,
        "training.ema": 0.9,
        "model.dropout": 0.1,
        "log.tracker": "jsonl",
        "data.corpus": f"('text_files:{ROOT}/xfresearch/models/*.py',)",
        "data.cache_dir": cache,
    }
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "xfresearch.train", f"--config={config}", f"--workdir={workdir}", *flags, *overrides]


def run(*arguments, devices=1, check=True, through=()):
    """Runs the command, or the program `through` with the command as its arguments."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    done = subprocess.run([*through, *command(*arguments)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr[-2000:]
    return done


def start(*arguments):
    return subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache):
    workdir = tmp_path_factory.mktemp("unbroken")
    run(workdir, cache)
    return workdir


def assert_same_run(workdir, other) -> None:
    assert digests(workdir, STEPS) == digests(other, STEPS)
    assert curve(workdir) == curve(other)


def kill_when(process, moment) -> None:
    deadline = time.time() + 120
    while process.poll() is None and not moment() and time.time() < deadline:
        time.sleep(0.001)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("kills", [3, 6])
def test_a_run_killed_at_random_moments_ends_bit_for_bit_like_the_uninterrupted_run(tmp_path, cache, unbroken, kills):
    rng, workdir, while_saving = random.Random(0), tmp_path / "killed", 0
    for number in range(kills):
        process = start(workdir, cache)
        if number % 3 == 2:  # while a checkpoint is being written
            kill_when(process, lambda: any(store.directory(workdir).glob("*tmp*")))
            while_saving += any(store.directory(workdir).glob("*tmp*"))
        else:
            before = rows_written(workdir)
            rows = rng.randrange(1, 14) if number else 2  # the first kill is before the first checkpoint
            kept = range(before, before + rows)  # fewer rows: the new process has begun, and removed some
            kill_when(process, lambda kept=kept: rows_written(workdir) not in kept)
        assert process.returncode == -signal.SIGKILL, "killed before it could end"
    assert while_saving >= 1
    run(workdir, cache)
    assert_same_run(workdir, unbroken)


def test_sigterm_saves_reports_it_and_exits_with_143(tmp_path, cache, unbroken):
    process = start(tmp_path, cache)
    while rows_written(tmp_path) < 20:
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, stderr[-2000:]
    assert "saved" in stderr and "SIGTERM" in stderr
    assert store.steps(tmp_path)[-1] % 9, "saved where it was, not at the next checkpoint"
    run(tmp_path, cache)
    assert_same_run(tmp_path, unbroken)


@pytest.mark.parametrize("how", ["truncated", "altered"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, cache, unbroken, how):
    shutil.copytree(unbroken, tmp_path / "run")
    newest = Path(store.directory(tmp_path / "run") / str(STEPS))
    largest = max((p for p in (newest / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data[: len(data) // 2] if how == "truncated" else data)
    done = run(tmp_path / "run", cache)
    assert f"checkpoint {STEPS} is damaged" in done.stderr
    assert "Traceback" not in done.stderr  # of arrays that Orbax abandons after the first that cannot be read
    assert_same_run(tmp_path / "run", unbroken)


def test_other_numbers_of_devices_see_exactly_the_same_batches(tmp_path, cache):
    """Sums have another order, so losses agree up to rounding. The data agrees exactly (see tests/data). The model is dense:
    where two experts are nearly equal, rounding decides between them, and losses differ by far more."""
    flags = [f"--config.{key}" for key in ("model.blocks.main.feed_forward.kind=swiglu", "steps=20", "checkpoint.every=20")]
    run(tmp_path / "four", cache, *flags, "--config.mesh.fsdp=2", devices=4)
    run(tmp_path / "single", cache, *flags)
    for a, b in zip(curve(tmp_path / "four")[:10], curve(tmp_path / "single")[:10], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_resumes_on_another_mesh(tmp_path, cache, unbroken):
    shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(store.directory(tmp_path / "run") / str(STEPS))
    uneven = "--config.evaluation.batch_size=3"  # two devices do not divide 3
    done = run(tmp_path / "run", cache, "--config.mesh.fsdp=2", uneven, devices=2)
    assert "config" not in done.stderr.splitlines()[-1]
    last, expected = curve(tmp_path / "run")[-1], curve(unbroken)[-1]
    assert last["step"] == STEPS and last["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_a_fork_resumes_with_another_config(tmp_path, cache, unbroken):
    shutil.copytree(unbroken, tmp_path / "run")
    longer = f"--config.steps={STEPS + 5}"
    done = run(tmp_path / "run", cache, "--config.optimizer.learning_rate=0.001", longer, "--fork")
    changes = f"config.optimizer.learning_rate: 0.01 -> 0.001; config.steps: {STEPS} -> {STEPS + 5}"
    assert f"--fork: resumes from step {STEPS} with {changes}; the learning rate of the next update is" in done.stderr
    assert store.steps(tmp_path / "run")[-1] == STEPS + 5
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optimizer"]["learning_rate"] == 0.001


def test_a_failed_write_stops_the_run_and_leaves_earlier_checkpoints_intact(tmp_path, cache, unbroken):
    """A file-size limit acts like a full disk: both make write() fail in the middle of a checkpoint."""
    shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(store.directory(tmp_path / "run") / str(STEPS))
    good = store.steps(tmp_path / "run")[-1]
    blocks = (tmp_path / "run" / "metrics.jsonl").stat().st_size // 1024 + 20  # enough for rows, not for a checkpoint
    limited = ["bash", "-c", 'ulimit -f "$0"; trap "" XFSZ; exec "$@"', str(blocks)]
    done = run(tmp_path / "run", cache, check=False, through=limited)
    assert done.returncode == errors.TRANSIENT, done.stderr[-1500:]
    assert f"the last checkpoint, step {good}, is intact" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr  # of TensorStore's threads, which continue with abandoned arrays
    run(tmp_path / "run", cache)
    assert_same_run(tmp_path / "run", unbroken)
