"""Checkpoints: which are kept, exact restore, and detection of damage in any file."""

import asyncio
import errno
import gc
import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from xfresearch.checkpoints import store, writing
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime import crash_log
from xfresearch.runtime.errors import Stopped
from xfresearch.runtime.files import move_damaged


def make_state() -> dict:
    params = {"embed": {"table": jax.random.normal(jax.random.key(0), (64, 32))}}
    state = {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(3), "skipped": jnp.int32(0)}
    return state | {"ema": jax.tree.map(lambda x: x / 2, params)}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    workdir, state = tmp_path_factory.mktemp("run"), make_state()
    checkpoints = store.Checkpoints(workdir, CheckpointConfig(keep=2, keep_every=4))
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5), (6, None), (7, 2.2)]:
        checkpoints.save(step, state, {"clock": {"step": 1.5}}, loss)
    checkpoints.close()
    return workdir, state


def test_keeps_the_newest_every_nth_and_the_best(saved):
    assert store.steps(saved[0]) == [2, 4, 6, 7]


def test_the_best_is_kept_after_a_restart(tmp_path):
    """The losses of 1 to 4 are those of an earlier process. That of 2 was measured after it was saved. The meta of 3 is
    damaged, so it cannot be the best one."""
    for part in ([(1, 3.0), (2, None), (3, 0.5), (4, 2.5)], [(5, 2.4), (6, 2.3)]):
        checkpoints = store.Checkpoints(tmp_path, CheckpointConfig(keep=4 if part[0][0] == 1 else 2))
        for step, loss in part:
            checkpoints.save(step, make_state(), {}, loss)
            if step == 2:
                checkpoints.add_loss(2, 1.0)
        checkpoints.close()
        if part[0][0] == 1:
            damage(store.directory(tmp_path) / "3" / "meta" / "metadata", "truncated")
    assert store.steps(tmp_path) == [2, 5, 6]


def test_checkpoints_are_some_seconds_apart(tmp_path, monkeypatch):
    """Updates take 3 s. 20 s are counted from the start, then from a checkpoint. keep_every and the last one do not wait."""
    now, asked = [100.0], []
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    checkpoints = store.Checkpoints(tmp_path, CheckpointConfig(every=2, seconds=20, keep=99, keep_every=12))
    monkeypatch.setattr(store.distributed, "shared", lambda value: asked.append(value) or value)
    for step in range(1, 32):
        now[0] += 3
        if checkpoints.due(step, last=31):
            checkpoints.save(step, make_state(), {})
    checkpoints.close()
    assert store.steps(tmp_path) == [8, 12, 20, 24, 31]
    assert len(asked) == 13, "the clock of process 0 decides, at even steps but 12 and 24"


@pytest.mark.parametrize("jump", [5000.0, -5000.0])
def test_a_clock_that_is_set_during_a_save_ends_no_wait(tmp_path, monkeypatch, jump):
    clock, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: clock() + jump * next(calls))
    checkpoints = store.Checkpoints(tmp_path, CheckpointConfig())
    for step in (1, 2):
        checkpoints.save(step, make_state(), {})
    checkpoints.close()
    assert store.steps(tmp_path) == [1, 2]


def test_without_seconds_each_checkpoint_is_due_and_no_process_waits(tmp_path, monkeypatch):
    checkpoints = store.Checkpoints(tmp_path, CheckpointConfig(every=2))
    monkeypatch.setattr(store.distributed, "shared", None)
    assert [step for step in range(1, 8) if checkpoints.due(step, last=7)] == [2, 4, 6, 7]
    checkpoints.close()


def test_restores_every_bit_and_the_types(saved):
    workdir, state = saved
    restored, meta = store.restore(workdir, 7, abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert meta["clock"] == {"step": 1.5}


def test_evaluation_gets_the_averaged_parameters(saved):
    workdir, state = saved
    params = store.restore_params(workdir, 7, abstract(state["params"]))
    jax.tree.map(np.testing.assert_array_equal, params, state["ema"])


def test_orbax_does_not_ask_jax_about_preemption(tmp_path, monkeypatch):
    """A call by Orbax would move the step at which JAX stops all processes beyond the calls of the loop."""
    from jax.experimental import multihost_utils

    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: asked.append(step) or True)
    checkpoints = store.Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(8, make_state(), {})
    checkpoints.close()
    assert store.steps(tmp_path) == [8] and not asked


def damage(path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "altered":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "altered", "missing"])
def test_damage_to_any_file_is_detected_or_harmless(saved, how):
    workdir, state = saved
    refusals = 0
    for path in sorted(p for p in (workdir / "checkpoints/7").rglob("*") if p.is_file()):
        whole = path.read_bytes()
        damage(path, how)
        try:
            restored, _ = store.restore(workdir, 7, abstract(state))
            jax.tree.map(np.testing.assert_array_equal, restored, state)
        except store.Corrupt as error:
            assert "checkpoint 7 is damaged" in str(error)
            refusals += 1
        path.write_bytes(whole)
    assert refusals >= 3, "the files with the arrays and the digests were damaged too"


def orbax_error(code: int) -> ValueError:
    """An error of the file system as TensorStore passes it on."""
    return ValueError(f"UNKNOWN: Error reading local file: [OS error {code}: {errno.errorcode[code]} {os.strerror(code)}]")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O"), PermissionError(errno.EACCES, "no"), orbax_error(errno.EIO)])
@pytest.mark.parametrize("failures", [2, 99])
def test_a_disk_that_fails_is_not_damage(saved, monkeypatch, failures, error):
    """It is tried again; if it goes on failing, nothing is moved, and the exit code says that a retry may help."""
    workdir, state = saved
    read = store.read_files
    tries = []

    def failing(*arguments):
        tries.append(1)
        if len(tries) <= failures:
            raise ValueError("Orbax says something") from error
        return read(*arguments)

    monkeypatch.setattr(store, "read_files", failing)
    monkeypatch.setattr(store.time, "sleep", lambda seconds: None)
    if failures == 2:
        restored, _ = store.restore(workdir, 7, abstract(state))
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        assert len(tries) == 3
    else:
        with pytest.raises(Stopped, match=f"checkpoint 7 in {workdir} cannot be read, but may be intact: "):
            store.restore(workdir, 7, abstract(state))
        assert store.steps(workdir)[-1] == 7 and len(tries) == 4


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), orbax_error(errno.ENOENT), ValueError("cut")])
def test_a_missing_or_short_file_is_damage_at_once(saved, monkeypatch, error):
    workdir, state = saved
    monkeypatch.setattr(store.time, "sleep", lambda seconds: pytest.fail("it was tried again"))

    def failing(*_):
        raise error

    monkeypatch.setattr(store, "read_files", failing)
    with pytest.raises(store.Corrupt):
        store.restore(workdir, 7, abstract(state))


def test_a_damaged_checkpoint_can_be_moved_away(tmp_path):
    store.save_params(tmp_path, 5, make_state()["params"])
    target = move_damaged(store.directory(tmp_path) / "5")
    assert store.steps(tmp_path) == [] and target == tmp_path / "damaged" / "5-0" and target.is_dir()


def test_in_a_bucket_a_checkpoint_is_complete_once_the_marker_is_written(tmp_path, monkeypatch):
    """A bucket has no rename, so Orbax writes straight to the final path."""
    for step in (4, 8):
        store.save_params(tmp_path, step, make_state()["params"])
    monkeypatch.setattr(store, "in_bucket", lambda path: True)
    monkeypatch.setattr(crash_log, "as_path", lambda address: tmp_path)
    assert store.steps(tmp_path) == [4, 8] and crash_log.resume_hint("gs://b/r").endswith("from step 8")
    (store.directory(tmp_path) / "8" / "commit_success.txt").unlink()
    assert store.steps(tmp_path) == [4] and crash_log.resume_hint("gs://b/r").endswith("from step 4")


def test_a_checkpoint_of_an_earlier_version_has_no_digest_and_is_not_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "with_digest", lambda meta: meta)
    params = make_state()["params"]
    store.save_params(tmp_path, 5, params)
    jax.tree.map(np.testing.assert_array_equal, store.restore_params(tmp_path, 5, abstract(params)), params)


def test_a_checkpoint_whose_arrays_were_not_joined_is_not_finished(tmp_path, monkeypatch):
    """Orbax joins the arrays of processes that its glob finds. A directory that may not be listed has none for a glob."""
    directory = epath.Path(tmp_path)
    checkpoints = store.Checkpoints(directory, CheckpointConfig(keep=1))
    checkpoints.save(1, make_state(), {})
    checkpoints.wait()
    monkeypatch.setattr(type(directory), "glob", lambda *_: iter(()))
    with pytest.raises(Stopped, match="no manifest.ocdbt.*the last checkpoint, step 1, is intact"):
        checkpoints.save(2, make_state(), {})
        checkpoints.wait()
    assert store.steps(directory) == [1]


@pytest.mark.parametrize("start", [asyncio.ensure_future, asyncio.gather])
@pytest.mark.parametrize(("file", "printed"), [("site-packages/orbax/checkpoint/reading.py", False), ("ours.py", True)])
def test_a_failed_task_that_nothing_awaits_is_reported_unless_orbax_abandoned_it(caplog, file, printed, start):
    writing.orbax()
    scope = {}
    exec(compile("async def read():\n    raise ValueError('cannot be read')", file, "exec"), scope)

    async def abandon():
        task = start(scope["read"]())
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # gather's future fails one turn after the task
        del task
        gc.collect()

    gc.freeze()  # the heap of the suite, which may have other failed tasks, and takes seconds to collect
    try:
        asyncio.run(abandon())
    finally:
        gc.unfreeze()
    assert ("exception was never retrieved" in caplog.text) == printed
