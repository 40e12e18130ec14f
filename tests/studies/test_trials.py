"""How a study goes on: its progress, its files, and what may be added to it."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.studies.test_merging import pretend
from tests.studies.tiny import FILE, run, time_nothing
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object, write_json
from xfresearch.studies import design, estimates, measurement, report, report_tables, study_plan, trials
from xfresearch.studies.allocation import TUNING_SEED, Cell, Trial
from xfresearch.studies.matching import matched
from xfresearch.studies.trials import open_store


def test_the_progress_counts_rates_beyond_the_grid(config, tmp_path, monkeypatch):
    """Larger rates are always better here, so that each arm tries all that the study allows."""
    chosen = replace(design.read(config), extensions=2)
    planned, store, shown, ended = study_plan.make(chosen), open_store(tmp_path), [], {}
    solved, ladder = planned.matched, planned.ladder
    stage = trials.stage

    @contextmanager
    def recorded(*arguments):
        with stage(*arguments) as progress:
            shown.append(progress)
            yield progress

    def run_trial(study, store, trial, matched, count):
        count(matched.config.steps)
        assert shown[-1].done <= shown[-1].total
        evaluation = {"bits_per_byte": 5 - trial.rate}
        ended[trial] = {"fingerprint": trial.folder, "evaluation": evaluation, "seconds": {"step": 1.0}}
        return ended[trial]

    monkeypatch.setattr(trials, "stage", recorded)
    monkeypatch.setattr(trials, "run_trial", run_trial)
    monkeypatch.setattr(trials, "_keep_runs", lambda *arguments: dict(arguments[-1]))
    trials.conduct(ladder, store, solved)
    beyond = [trial for trial in ended if trial.tunes and trial.rate not in chosen.rates]
    assert len(beyond) == chosen.extensions * len(chosen.arms) > 0
    monkeypatch.setattr(trials, "results", lambda *_: ended)
    trials.conduct(ladder, store, solved)  # it has all results from the start
    assert all(each.done == each.total == 12 * len(ended) for each in shown)


def test_processes_that_write_at_once_lose_no_run(config, tmp_path, monkeypatch):
    """Between this process's last reading and writing of runs.json, another one ends a run, and then all that are left."""
    monkeypatch.setattr(trials, "run_trial", pretend)
    chosen = replace(design.read(config), probes=())
    planned, read, store = study_plan.make(chosen), trials.read_runs, open_store(tmp_path)
    solved, other = planned.matched, Cell("tiny", "parallel")

    def interrupted(folder):
        before = read(folder)
        if len(before) == 1:  # it writes its second run now
            pretend(chosen, store, Trial(other, chosen.rates[0], TUNING_SEED), solved[other], None)
        if len(before) == 2:
            monkeypatch.setattr(trials, "read_runs", read)
            trials.conduct(planned.ladder, open_store(tmp_path), solved)
        return before

    monkeypatch.setattr(trials, "read_runs", interrupted)
    measured = trials.conduct(planned.ladder, open_store(tmp_path), solved)
    kept = measurement.read_runs(tmp_path)
    assert len(measured) == len(kept) == 8 and {result["fingerprint"] for result in measured.values()} == kept.keys()


def test_processes_that_made_other_runs_conclude_the_same(config, tmp_path, monkeypatch):
    """One of them made a run when it had not seen the run of another that spares it."""
    monkeypatch.setattr(trials, "run_trial", pretend)
    chosen = replace(design.read(config), probes=())
    planned, store = study_plan.make(chosen), open_store(tmp_path)
    solved, ladder = planned.matched, planned.ladder
    every = trials.conduct(ladder, store, solved)
    spared = Trial(Cell("tiny", "base"), 0.5, TUNING_SEED)
    known = every | {spared: pretend(chosen, store, spared, solved[spared.cell], None)}
    assert [*trials.results(ladder, store, solved, known)] == [*trials.results(ladder, store, solved)] == [*every]
    assert [*trials._keep_runs(ladder, store, solved, known)] == [*every]
    assert len(measurement.read_runs(tmp_path)) == len(every) + 1  # it is not lost: another design may need it


def test_only_an_arm_that_is_added_gets_options_later(tmp_path, monkeypatch, capsys):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", pretend)
    file, end = tmp_path / "study.py", "    return study"
    config = ["--config", str(file), "--config.probes=()"]
    file.write_text(FILE)
    run(config, tmp_path / "study")
    third = '    study.arms.third = ("model.blocks.main.layout=no_norm_between",)\n    study.solve_in.third = ""\n'
    file.write_text(FILE.replace(end, third + end))
    run(config, tmp_path / "study")
    assert "note       there are no seconds of third: updates were not timed;" in capsys.readouterr().out
    assert "There are no seconds of third, because updates" in (tmp_path / "study" / "report.md").read_text()
    changes = {"cells": '{"tiny/parallel": ("model.depth=3",)}', "solve_in": '{"parallel": "steps"}'}
    for kind, change in changes.items():
        file.write_text(FILE.replace(end, f"    study.{kind} = {change}\n{third}{end}"))
        with pytest.raises(UserError, match=rf"config.{kind}.*parallel=.* is not allowed with .*, which began with None"):
            run(config, tmp_path / "study")


def test_times_that_cannot_be_read_are_one_line(config, tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    wrongs = {'{"updates": []}': r"updates=\[\] is not allowed: it must be an object", "{}": "updates is missing"}
    wrongs |= {'{"updates": {"tiny/base": 3}}': "updates.tiny/base=3 is not allowed: it must be an object"}
    seconds = '{"updates": {"tiny/base": {"seconds": "1"}}}'
    wrongs |= {seconds: "updates.tiny/base.seconds='1' is not allowed: it must be a number"}
    for wrong, words in wrongs.items():
        (tmp_path / "seconds.json").write_text(wrong)
        with pytest.raises(UserError, match=f"seconds.json: {words}: remove the file, and --time times them again"):
            run(config, tmp_path, "--time")


def test_a_probe_that_is_added_is_checked_before_anything_runs(config, tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", pretend)
    run([*config, "--config.probes=()"], tmp_path)
    monkeypatch.setattr(trials, "run_trial", None)
    for more in ([], ["--job=0"]):
        with pytest.raises(UserError, match="probes='attention.entropi' is not allowed"):
            run([*config, "--config.probes=('attention.entropi',)"], tmp_path, *more)


def test_a_design_that_is_damaged_is_one_line(config, tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", pretend)
    run([*config, "--config.probes=()"], tmp_path)
    kept = read_object(tmp_path / "study.json")
    for wrong, words in (({}, "base, options, .*solve_in"), (kept | {"arms": 3}, "arms")):
        write_json(tmp_path / "study.json", wrong)
        with pytest.raises(UserError, match=rf"study.json is damaged or .* \(it has no {words}\): restore it"):
            run(config, tmp_path)


def test_a_mismatch_that_only_a_tiny_study_may_have_is_not_called_equal(config, tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", pretend)
    run([*config, "--config.probes=()"], tmp_path)
    results = read_object(tmp_path / "results.json")
    results["sizes"]["tiny"]["arms"]["parallel"]["mismatch"] = 0.5
    assert "The FLOPs of arms differ by up to 50%." in report.training(results)


def test_a_probe_that_one_seed_has_shows_no_interval():
    assert report_tables._with_half([0.5, None, None]) == "0.500 (1 of 3 seeds)"


def test_checkpoints_that_a_killed_process_left_are_removed(config, tmp_path, monkeypatch):
    chosen = replace(design.read(config), probes=())
    planned = study_plan.make(chosen)
    trial = planned.ladder.ready({})[0]
    pretend(chosen, open_store(tmp_path), trial, planned.matched[trial.cell], None)
    (tmp_path / trial.folder / "checkpoints" / "12").mkdir(parents=True)
    monkeypatch.setattr(trials, "run_trial", pretend)
    assert trial in trials.conduct(planned.ladder, open_store(tmp_path), planned.matched, 0)
    assert not (tmp_path / trial.folder / "checkpoints").exists()


def trained_with(config, *options: str):
    """The config of a run of the study with these options."""
    matched = next(iter(study_plan.make(replace(design.read(config), options=options)).matched.values()))
    return measurement.config_of_trial(Trial(Cell("tiny", "base"), 1e-2, 0), matched.config)


def test_a_run_has_no_panel_of_its_layers(config):
    assert trained_with(config, "log.panel=4").log.panel == 0


@pytest.mark.parametrize("options, seconds", [((), 60.0), (("checkpoint.seconds=600",), 600.0)])
def test_a_run_saves_once_a_minute_or_less_often(config, options, seconds):
    assert trained_with(config, *options).checkpoint.seconds == seconds


def test_a_rate_at_the_edge_is_told_for_each_size_that_tunes(config, tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", pretend)
    run([*config, "--config.probes=()"], tmp_path)
    results = read_object(tmp_path / "results.json")
    here = results["sizes"]["tiny"]
    here["arms"]["parallel"] |= {"edge": "high"}
    two = results | {"sizes": {"tiny": here, "other": here}}
    assert [line.split(",")[1].strip().partition(" at ")[2] for line in report._edge(two, "parallel")] == ["tiny", "other"]
    two["study"]["tune_at"] = ["other"]
    assert len(report._edge(two, "parallel")) == 1 and " at other" not in report._edge(two, "parallel")[0]


def test_blocks_have_no_rows_of_padding():
    sums = {"nll": np.array([1.0, 2.0, 4.0, 0.0]), "bytes": np.array([2, 2, 2, 0]), "tokens": np.array([1, 1, 1, 0])}
    assert measurement.blocks(sums, "loss") == {"values": [1.0, 2.0, 4.0], "sizes": [1, 1, 1]}


def test_the_time_of_a_run_is_that_of_all_its_processes():
    parts = {"step": 8.0, "evaluation": 0.5, "metric": 0.5, "tokens": 99}
    run_of = lambda **seconds: {"seconds": parts | seconds}  # noqa: E731
    assert measurement.seconds(run_of(probes=0.5, compile=0.5)) == 10
    shares = estimates.shares([run_of(compile=1.0, probes=0.0), run_of(probes=1.0)])
    assert shares == pytest.approx({"updates": 0.8, "held-out metrics": 0.1, "probes": 0.05, "overhead": 0.05})


def test_a_run_that_resumes_counts_what_it_had():
    counted = []
    shown = measurement.Counted(counted.append)
    for step in (301, 302):
        shown.on_step(step, {})
    assert sum(counted) == 302


def test_an_arm_of_other_random_numbers_has_other_seeds_in_every_run():
    study = design.read(["--config", "configs/studies/null.py:tiny"])
    trials = [Trial(Cell("tiny", arm), 1e-2, seed) for arm in ("base", "again", "once_more") for seed in (1, TUNING_SEED)]
    made = {arm: matched(study, Cell("tiny", arm), {}).config for arm in study.arms}
    seeds = [measurement.config_of_trial(trial, made[trial.cell.arm]).seed for trial in trials]
    assert seeds == [shift + seed for shift in (0, 10_000, 20_000) for seed in (1, TUNING_SEED)]
