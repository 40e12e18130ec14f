"""Studies that stopped before a run had a result, and go on with another design or version."""

import signal

import pytest

from tests.studies.tiny import run, time_nothing
from xfresearch.runtime import hardware
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object, write_json
from xfresearch.studies import matching, trials
from xfresearch.training.program import Program


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
        patch.setattr(trials, "run_trial", interrupt)
        run(config, tmp_path, "--config.margin=0.5")
    run(config, tmp_path, "--job=0")
    assert read_object(tmp_path / "study.json")["margin"] == 0.02


def test_an_arm_that_has_changed_is_timed_again(config, tmp_path, monkeypatch):
    times = iter([1.0, 0.5, 2.0])
    monkeypatch.setattr(matching, "seconds_per_update", lambda config: next(times))
    monkeypatch.setattr(matching, "relative_seconds", lambda config, baseline: next(times))
    run(config, tmp_path, "--time")
    run(config, tmp_path, "--time", "--config.rates=(1e-3,1e-2)")  # takes no more time: nothing is timed
    other = "--config.arms.parallel=('model.blocks.main.layout=no_norm_between',)"
    run(config, tmp_path, "--time", other)
    updates = read_object(tmp_path / "seconds.json")["updates"]
    assert {cell: each["seconds"] for cell, each in updates.items()} == {"tiny/base": 1.0, "tiny/parallel": 2.0}
    times = iter([4.0, 0.75])  # the baseline changes, and the machine is another one: an old time of the arm is of no use
    run(config, tmp_path, "--time", other, "--config.arms.base=('model.blocks.main.layout=no_residual_between',)")
    updates = read_object(tmp_path / "seconds.json")["updates"]
    assert {cell: each["seconds"] for cell, each in updates.items()} == {"tiny/base": 4.0, "tiny/parallel": 3.0}


def test_a_signal_that_comes_with_the_last_update_ends_the_study_after_its_run(config, tmp_path, monkeypatch, capsys):
    from xfresearch.training import loop

    train = loop.train
    monkeypatch.setattr(loop, "train", lambda *args, **options: train(*args, **options)._replace(stopped_by="SIGTERM"))
    with pytest.raises(SystemExit) as stopped:
        run(config, tmp_path)
    assert stopped.value.code == 128 + signal.SIGTERM and "SIGTERM: saved" in capsys.readouterr().err
    assert len(list(tmp_path.glob("tiny/*/*/result.json"))) == 1


def test_a_job_that_does_not_exist_is_one_line(config, tmp_path, capsys):
    run(config, tmp_path, "--job=count")
    assert capsys.readouterr().out == "8\n"
    for wrong in ("8", "-1", "auto"):
        with pytest.raises(UserError, match=f"--job={wrong} is not allowed: it must be at least 0 and at most 7"):
            run(config, tmp_path, f"--job={wrong}")


def test_a_probe_that_is_added_is_measured_on_kept_checkpoints_by_another_commit(config, tmp_path, monkeypatch):
    kept = [*config, "--config.keep=True", "--config.extensions=0"]
    run([*kept, "--config.probes=()"], tmp_path)
    trained = read_object(tmp_path / "runs.json")["runs"]
    monkeypatch.setattr(hardware, "git_commit", lambda: "c0ffee")
    monkeypatch.setattr(Program, "compiled_update", None)  # no update is computed
    run([*kept, "--config.probes=('copying',)"], tmp_path)
    measured = read_object(tmp_path / "runs.json")["runs"]
    assert measured.keys() == trained.keys()
    assert {(*each["probes"],) for each in measured.values()} == {(), ("copying",)}
    assert "c0ffee" not in {each["made"]["commit"] for each in measured.values()}  # which has trained nothing
    assert all(each["evaluation"] == trained[name]["evaluation"] for name, each in measured.items())
    for file in tmp_path.glob("tiny/*/*/result.json"):
        result = read_object(file)
        write_json(file, result | {"data": result["data"] | {"tokenizer": "c0ffee"}})
    (tmp_path / "runs.json").unlink()
    with pytest.raises(UserError, match=r"has a run with other data \(tokenizer: 'c0ffee' -> .*: restore them, or remove"):
        run([*kept, "--config.probes=('copying','recall')"], tmp_path)


@pytest.mark.parametrize("workdir", ["file", "file/below"])
def test_a_directory_that_cannot_be_written_is_one_line(config, tmp_path, workdir):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--workdir={tmp_path}/{workdir}/study.json cannot be written"):
        run(config, tmp_path / workdir)


def test_a_command_without_a_config_or_a_directory_is_one_line(tmp_path):
    with pytest.raises(UserError, match="--config FILE, --arms CHANGE ... or --runs RUN RUN ... is required"):
        run([], tmp_path)
    with pytest.raises(UserError, match="--workdir='' is not allowed: it must be the directory of the study"):
        run([], "")


def test_a_home_directory_is_expanded(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    time_nothing(monkeypatch)
    run(config, "~/study", "--time")
    assert (tmp_path / "study/seconds.json").exists()


def interrupt(*_):
    raise KeyboardInterrupt
