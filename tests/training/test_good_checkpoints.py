"""Which checkpoints are good, that no other one is chosen by default, and what a reader sees of one that is deleted."""

import os
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import make_run
from tests.training.test_checkpoint import abstract, make_state
from xfresearch import analyze, evaluate
from xfresearch.checkpoints import pruning, store, validity
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime import crash_log

TABLE = "params/embed/table"


def altered(state: dict, part: str, value: float) -> dict:
    """The state with one value in its parameters, its averages or its second moments."""
    changed = jax.tree.map(jnp.copy, state)
    if part == "opt":
        nu = changed["opt"][0].nu["embed"]
        nu["table"] = nu["table"].at[3, 5].set(value)
    else:
        changed[part]["embed"]["table"] = changed[part]["embed"]["table"].at[3, 5].set(value)
    return changed


def saved_by(workdir, steps: int, **options) -> store.Checkpoints:
    """Checkpoints of the steps 1, 2, ..., each proven by the update after it."""
    checkpoints = store.Checkpoints(workdir, CheckpointConfig(**options))
    for step in range(1, steps + 1):
        checkpoints.prove(step - 1)
        assert checkpoints.save(step, make_state(), {}) == ""
    checkpoints.wait()
    return checkpoints


def test_a_state_with_a_value_that_is_not_finite_is_not_written(tmp_path):
    checkpoints = saved_by(tmp_path, 1)
    for part, name in [("params", TABLE), ("ema", "ema/embed/table"), ("opt", "rest/['opt'][0].nu['embed']['table']")]:
        for value in (np.nan, np.inf, -np.inf):
            reason = checkpoints.save(2, altered(make_state(), part, value), {})
            assert reason == f"{name} has values that are not finite"
    checkpoints.close()
    assert store.present(tmp_path) == [1]


def test_a_state_whose_held_out_loss_is_not_finite_is_not_written(tmp_path):
    checkpoints = saved_by(tmp_path, 1)
    measured = {"evaluation": {"loss": float("nan")}, "evaluated": 2}
    assert checkpoints.save(2, make_state(), measured) == "its held-out loss is not finite"
    assert checkpoints.save(3, make_state(), measured) == ""  # the loss of another state
    checkpoints.close()
    assert store.steps(tmp_path) == [1, 3]


def test_a_loss_that_is_not_finite_is_never_the_best():
    kept = pruning.Kept(CheckpointConfig(keep=1), {})
    checkpoints = store.Checkpoints.__new__(store.Checkpoints)
    checkpoints.kept = kept
    for step, loss in [(1, float("nan")), (2, 2.0), (3, 3.0), (4, float("inf")), (5, None)]:
        checkpoints.add_loss(step, loss)
    assert kept.losses == {2: 2.0, 3: 3.0}


def test_a_loss_that_is_not_finite_in_an_old_meta_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "is_finite", lambda loss: loss is not None)
    checkpoints = store.Checkpoints(tmp_path, CheckpointConfig(keep=9))
    for step, loss in [(1, float("nan")), (2, 2.0)]:
        checkpoints.save(step, make_state(), {}, loss)
    checkpoints.close()
    monkeypatch.undo()
    assert store._losses(tmp_path) == {2: 2.0}


def test_the_last_checkpoint_that_is_known_to_be_good_is_kept(tmp_path):
    """The states after update 2 are not known to be good: the updates from 3 on were skipped."""
    checkpoints = store.Checkpoints(tmp_path, CheckpointConfig(keep=1))
    for step in range(1, 6):
        checkpoints.prove(min(step - 1, 2))
        checkpoints.save(step, make_state(), {})
    checkpoints.wait()
    assert store.steps(tmp_path) == [2, 5]
    checkpoints.prove(5)  # its held-out loss is finite
    checkpoints.reject_unproven("unused")
    checkpoints.save(6, make_state(), {})
    checkpoints.reject_unproven("the next update was not finite")
    assert store.steps(tmp_path) == [5] and store.published(tmp_path) == [5, 6]
    assert crash_log.resume_hint(str(tmp_path)).endswith("from step 5")
    checkpoints.close()


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of the steps 10 and 20."""
    return make_run(tmp_path / "run")


def test_no_command_chooses_a_rejected_checkpoint(run, tmp_path, capsys):
    validity.reject(store.directory(run) / "20", "the loss of step 21\n is not finite")
    assert xf.load(run).step == 10 and "warning" not in capsys.readouterr().err
    said = f"warning: {run}: checkpoint 20 is not good: the loss of step 21 is not finite\n"
    assert xf.load(run, step=20).step == xf.load(run / "checkpoints" / "20").step == 20
    assert capsys.readouterr().err == 2 * said
    validity.reject(store.directory(run) / "10", "too")
    with pytest.raises(xf.UserError, match="has no good checkpoint: name one of the steps 10, 20 to read it all the same"):
        xf.load(run)


def not_validated(workdir, monkeypatch, steps: dict[int, dict]) -> None:
    """Checkpoints as an earlier version wrote them: {step: state}."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "VALIDATED", "unknown")
        patch.setattr(store, "fault", lambda *_: "")
        checkpoints = store.Checkpoints(workdir, CheckpointConfig(keep=9))
        for step, state in steps.items():
            checkpoints.save(step, state, {})
        checkpoints.close()


@pytest.mark.parametrize("part", ["params", "opt"])
def test_a_checkpoint_that_was_not_validated_is_validated_when_it_is_read(tmp_path, monkeypatch, capsys, part):
    state = {name: value for name, value in make_state().items() if name != "ema"}
    not_validated(tmp_path, monkeypatch, {1: state, 2: altered(state, part, np.nan)})
    whole = abstract(state)
    step, _ = validity.newest_good(partial(store.steps, tmp_path), lambda step: store.restore(tmp_path, step, whole))
    warning = capsys.readouterr().err
    assert step == 1 and "checkpoint 2 is not good: " in warning and "not finite; trying another" in warning
    read = partial(store.restore_params, tmp_path, 2, whole["params"])
    if part == "opt":
        assert np.isfinite(read()["embed"]["table"]).all()  # an evaluation does not read the optimizer state
        return
    with pytest.raises(validity.NotGood):
        read()
    assert np.isnan(read(named=True)["embed"]["table"]).any()
    assert capsys.readouterr().err.count("checkpoint 2 is not good: params/embed/table") == 1


def test_a_checkpoint_that_is_read_is_deleted_later(tmp_path):
    checkpoints = saved_by(tmp_path, 2)
    with pruning.reading(store.directory(tmp_path) / "1") as there:
        for step in (3, 4):
            checkpoints.prove(step - 1)
            checkpoints.save(step, make_state(), {})
        checkpoints.wait()
        assert there and store.steps(tmp_path) == [1, 3, 4]
        restored, _ = store.restore(tmp_path, 1, abstract(make_state()))
    checkpoints.prove(4)
    checkpoints.save(5, make_state(), {})
    checkpoints.close()
    assert store.present(tmp_path) == [4, 5] and int(restored["step"]) == 3


def test_readers_are_told_when_deletion_has_begun(tmp_path, monkeypatch):
    """Orbax removes one file after another. Here it is killed before the first one."""
    checkpoints = saved_by(tmp_path, 1)
    seen = []

    def delete(step):
        with pruning.reading(store.directory(tmp_path) / str(step)) as there:
            seen.append((there, store.steps(tmp_path)))
        with pytest.raises(validity.Deleted):
            store.restore(tmp_path, step, abstract(make_state()))

    monkeypatch.setattr(checkpoints.manager._checkpoint_deleter.deleter, "delete", delete)
    checkpoints.manager._checkpoint_deleter.delete(1)
    checkpoints.close()
    assert seen == [(False, [])] and store.present(tmp_path) == [1]


@pytest.mark.parametrize("locks", [True, False])
def test_a_reader_takes_the_next_checkpoint_if_the_run_deletes_its_own(run, monkeypatch, capsys, locks):
    """On file systems without locks, and in buckets, the files go while they are read."""
    read, folder = store.read_files, store.directory(run)

    def slow(path, wanted):
        if path.name == "20":
            os.rename(folder / "20", folder / "30")
        return read(path, wanted)

    monkeypatch.setattr(store, "read_files", slow)
    if not locks:
        monkeypatch.setattr(pruning, "open_lock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    assert xf.load(run).step == 30
    said = capsys.readouterr().err
    assert "checkpoint 20 was deleted by the run meanwhile" in said and "damaged" not in said
    os.rename(folder / "30", folder / "20")
    with pytest.raises(xf.UserError, match="checkpoint 20 was deleted by the run meanwhile$"):
        xf.load(run, step=20)


def test_a_reader_of_every_step_leaves_out_those_that_are_deleted(run, monkeypatch, capsys):
    lm = xf.load(run)
    listed = store.agreed_steps
    monkeypatch.setattr(store, "agreed_steps", lambda workdir: [5, *listed(workdir)])
    monkeypatch.setattr(evaluate.held_out, "Scorer", lambda *_: lambda *_: {})
    monkeypatch.setattr(evaluate, "metrics", lambda *_: {})
    options = type("Options", (), {"all_steps": True, "batch_size": 0, "per_document": False, "job": None})
    data = SimpleNamespace(digest="", rows=[], meta={})
    assert [each["step"] for each in evaluate.evaluate_steps(lm, run, data, options)] == [10, 20]
    assert "checkpoint 5 was deleted by the run meanwhile; skipped" in capsys.readouterr().err
    calls = iter([[5, 10, 20], [10, 20], [10, 20], [10, 20]])
    monkeypatch.setattr(store, "agreed_steps", lambda workdir: next(calls))
    options = type("Options", (), {"step": "all", "workdir": str(run)})
    assert [each.step for each in analyze.steps(options, lm)] == [10, 20]
    assert "skipped" in capsys.readouterr().err


def test_a_directory_that_was_not_published_is_no_checkpoint(run):
    """A part of a copy, or of a checkpoint that was being deleted when its run was killed."""
    shutil.copytree(run / "checkpoints" / "20", run / "checkpoints" / "30")
    (run / "checkpoints" / "30" / validity.PUBLISHED).unlink()
    (run / "checkpoints" / "²").mkdir()
    assert store.steps(run) == store.published(run) == [10, 20] and store.present(run) == [10, 20, 30]
    assert xf.load(run).step == 20 and crash_log.resume_hint(str(run)).endswith("from step 20")
