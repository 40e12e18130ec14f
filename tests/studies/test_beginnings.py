"""Studies that stopped before a run had a result, and go on with another design or version."""

import signal

import pytest

from tests.studies.tiny import run, time_nothing
from xfresearch import hardware
from xfresearch.errors import UserError
from xfresearch.files import read_object
from xfresearch.studies import conducting, plan


def stop_after_training(monkeypatch):
    """A process that is killed when its first run has been trained, but has no result yet."""
    from xfresearch.training import loop

    train = loop.train

    def stopped(*arguments, **options):
        train(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", stopped)


def test_the_beginning_of_a_run_of_another_config_is_refused(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after_training(patch)
        run(config, tmp_path)
    with pytest.raises(UserError, match=r"seed-1000 has a run of another config \(.*width: 16 -> 8.*: give the arm"):
        run(config, tmp_path, "--config.arms.base=('model.width=8',)")


def test_the_beginning_of_a_run_with_other_versions_is_refused(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after_training(patch)
        run(config, tmp_path)
    monkeypatch.setattr(hardware, "git_commit", lambda: "c0ffee")
    with pytest.raises(UserError, match=r"seed-1000 has the beginning of .*\(commit: .*c0ffee.*remove this directory"):
        run(config, tmp_path)


def test_a_design_may_change_before_the_runs(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(conducting, "run_trial", interrupt)
        run(config, tmp_path, "--config.margin=0.5")
    run(config, tmp_path, "--cell=0")
    assert read_object(tmp_path / "study.json")["margin"] == 0.02


def test_an_arm_that_has_changed_is_timed_again(config, tmp_path, monkeypatch):
    times = iter([1.0, 0.5, 2.0])
    monkeypatch.setattr(plan, "seconds_per_update", lambda config: next(times))
    monkeypatch.setattr(plan, "relative_seconds", lambda config, baseline: next(times))
    run(config, tmp_path, "--plan")
    run(config, tmp_path, "--plan", "--config.rates=(1e-3,1e-2)")  # takes no more time: nothing is timed
    run(config, tmp_path, "--plan", "--config.arms.parallel=('model.blocks.main.layout=no_norm_between',)")
    updates = read_object(tmp_path / "seconds.json")["updates"]
    assert {cell: each["seconds"] for cell, each in updates.items()} == {"tiny/base": 1.0, "tiny/parallel": 2.0}


def test_a_signal_that_comes_with_the_last_update_ends_the_study_after_its_run(config, tmp_path, monkeypatch, capsys):
    from xfresearch.training import loop

    train = loop.train
    monkeypatch.setattr(loop, "train", lambda *args, **options: train(*args, **options)._replace(stopped_by="SIGTERM"))
    with pytest.raises(SystemExit) as stopped:
        run(config, tmp_path)
    assert stopped.value.code == 128 + signal.SIGTERM and "SIGTERM: saved" in capsys.readouterr().err
    assert len(list(tmp_path.glob("tiny/*/*/result.json"))) == 1


@pytest.mark.parametrize("workdir", ["file", "file/below"])
def test_a_directory_that_cannot_be_written_is_one_line(config, tmp_path, workdir):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--workdir={tmp_path}/{workdir}/study.json cannot be written"):
        run(config, tmp_path / workdir)


def test_a_home_directory_is_expanded(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    time_nothing(monkeypatch)
    run(config, "~/study", "--plan")
    assert (tmp_path / "study/seconds.json").exists()


def interrupt(*_):
    raise KeyboardInterrupt
