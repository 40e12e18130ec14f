"""Studies that stopped before a run had a result, and go on with another design or version."""

import pytest

from tests.studies.tiny import run
from xfresearch import hardware
from xfresearch.errors import UserError
from xfresearch.files import read_object
from xfresearch.studies import conducting


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


def interrupt(*_):
    raise KeyboardInterrupt
