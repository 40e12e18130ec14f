"""A whole ladder with planted runs: choice of rates, verdicts, report, ledger, and files for other programs."""

import csv
import json
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.studies import test_merging
from tests.studies.tiny import FILE, MADE, entries, run, time_nothing
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object, write_json
from xfresearch.studies import design, measurement, preregistration, study_plan, trials
from xfresearch.studies.trials import open_store
from xfresearch.training.claims import Busy

LADDER = """    study.arms["vanishing"] = ("model.blocks.main.layout=no_norm_between",)
    study.options = (*study.options, "optimizer.warmup=0")
    study.sizes = {f"w{width}": (f"model.width={width}", "model.depth=1") for width in (8, 16, 24)}
    study.more_sizes = {"w32": ("model.width=32", "model.depth=1")}
    study.budgets, study.tune_at, study.seeds, study.rate_runs = (0.5, 1.0), ("w8-x0.5", "w16-x1"), 4, 2
    study.rates, study.probes = (0.01, 0.02, 0.04), ()
    return study"""
EFFECTS = {"base": (0.0, 0.0), "parallel": (0.1, 0.1), "vanishing": (0.1, 0.0)}  # with few and with many tokens
NOISE = 2e-3


def planted(study, store, trial, matched, count) -> dict:
    """A run of the planted truth: the best rate is 0.02, and falls with the size for one arm."""
    result = test_merging.pretend(study, store, trial, matched, count)
    rng = np.random.default_rng(zlib.crc32(trial.folder.encode()))
    power = -0.3 if trial.cell.arm == "parallel" else 0.0
    off = math.log(trial.rate / 0.02) - power * math.log(matched.parameters / 3000)
    few = trial.cell.rung.endswith("x0.5")
    value = 2.0 - 0.5 * (not few) + EFFECTS[trial.cell.arm][not few] + 0.05 * off**2 + NOISE * rng.standard_normal()
    result["evaluation"] = {study.metric: value, "bytes": 200, "tokens": 100}
    write_json(store.folder / trial.folder / "result.json", result)
    return result


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("config") / "ladder.py"
    file.write_text(FILE.replace("    return study", LADDER))
    return ["--config", str(file)]


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        time_nothing(patch)
        patch.setattr(trials, "run_trial", planted)
        run(config, folder, "--tracker", "jsonl")
    return folder


@pytest.fixture
def instant(monkeypatch):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", planted)


def copied(finished, folder):
    (folder / "tracker").mkdir()
    kept = ("study.json", "runs.json", "seconds.json", "ledger.json", "tracker/entries.jsonl", "tracker/sent.json")
    for name in kept:
        (folder / name).write_bytes((finished / name).read_bytes())
    return folder


def test_the_verdict_says_what_holds_and_what_vanishes(finished):
    outcome = read_object(finished / "results.json")
    assert list(outcome["sizes"]) == ["w8-x0.5", "w8-x1", "w16-x0.5", "w16-x1", "w24-x0.5", "w24-x1"]
    parallel, vanishing = outcome["ladder"]["parallel"], outcome["ladder"]["vanishing"]
    assert parallel["verdict"] == "worse" and parallel["changes"]["budgets"]["shape"] == "stays"
    assert vanishing["verdict"] == "mixed" and vanishing["changes"]["budgets"]["shape"] == "shrinks"
    text = (finished / "report.md").read_text()
    assert "worse at w8-x0.5, w16-x0.5, w24-x0.5; equivalent at w8-x1, w16-x1, w24-x1" in text
    assert "along tokens for each parameter from 0.4" in text and "the cost shrinks:" in text
    assert "The rule was written on" in text and "no run existed by then." in text
    assert "more tokens at w8" in text and "nats per token" in text  # what the margin is worth
    assert outcome["margin"]["tokens_worth"]["w16"] == pytest.approx(math.expm1(0.02 * math.log(2) / 0.5), rel=0.1)
    assert "## Law of the losses" in text and set(outcome["laws"]) == set(EFFECTS)


def test_rates_of_two_rungs_go_to_the_others(finished):
    arms = {rung: here["arms"]["parallel"] for rung, here in read_object(finished / "results.json")["sizes"].items()}
    expected = {rung: 0.02 * (arm["parameters"] / 3000) ** -0.3 for rung, arm in arms.items()}
    assert {rung for rung, arm in arms.items() if arm["tried"]} == {"w8-x0.5", "w16-x1"}
    assert arms["w16-x1"]["rate"] == pytest.approx(expected["w16-x1"], rel=0.15)
    assert arms["w24-x1"]["rate"] < arms["w16-x1"]["rate"] < arms["w8-x0.5"]["rate"]


def test_ten_lines_of_scipy_find_the_same_verdicts(finished):
    runs = list(csv.DictReader((finished / "runs.csv").read_text().splitlines()))
    value = {(run["rung"], run["arm"], run["seed"]): float(run["metric"]) for run in runs if run["use"] == "decides"}
    for row in csv.DictReader((finished / "differences.csv").read_text().splitlines()):
        each = [value[row["rung"], row["arm"], seed] - value[row["rung"], "base", seed] for seed in "0123"]
        actual = stats.ttest_1samp(each, 0.0).pvalue * 12 < 0.05  # Bonferroni: two arms at six rungs
        within = max(stats.ttest_1samp(np.multiply(sign, each), 0.02, alternative="less").pvalue for sign in (1, -1)) * 12
        assert row["verdict"] == ("equivalent" if within < 0.05 else "worse" if actual else "undecided"), row
        assert float(row["low"]) < np.mean(each) < float(row["high"])


def test_the_results_are_a_table_for_a_paper_and_a_figure(finished):
    table = (finished / "differences.tex").read_text()
    assert table.count(r"\\") == 13 and r"w8-x0.5 & parallel & $+0." in table and r"\bottomrule" in table
    assert (finished / "differences.svg").read_text().startswith("<svg")
    assert len((finished / "runs.csv").read_text().splitlines()) == 1 + read_object(finished / "results.json")["runs"]


def test_a_tracker_has_every_run_and_the_verdicts(finished):
    *runs, verdicts = entries(finished)
    names = ("rung", "arm", "learning_rate", "seed", "use", "parameters", "tokens")
    sent = [*([*(str(entry[name]) for name in names), str(entry["evaluation/bits_per_byte"])] for entry in runs)]
    table = csv.DictReader((finished / "runs.csv").read_text().splitlines())
    assert sorted(sent) == sorted([row[name] for name in (*names, "metric")] for row in table)
    for row in csv.DictReader((finished / "differences.csv").read_text().splitlines()):
        for name in ("difference", "low", "high"):
            assert verdicts[f"{row['rung']}/{row['arm']}/{name}"] == float(row[name])
    (version,) = preregistration.read(finished)
    assert list(verdicts["verdicts"].values()) == version["verdicts"] and verdicts["version"] == version["digest"]


def test_another_margin_is_another_version_beside_the_first(config, finished, tmp_path, instant):
    copied(finished, tmp_path)
    run(config, tmp_path, "--config.margin=0.2", "--tracker", "jsonl")
    *before, verdicts = entries(tmp_path)
    assert before == entries(finished) and verdicts["margin"] == 0.2  # no run is sent again
    outcome = read_object(tmp_path / "results.json")
    assert outcome["ladder"]["parallel"]["verdict"] == "equivalent"
    first, second = outcome["versions"]
    assert second["changes"] == ["margin: 0.02 -> 0.2"] and second["seen"]["runs"] == outcome["runs"]
    assert any("parallel is worse" in line for line in first["verdicts"])
    text = (tmp_path / "report.md").read_text()
    assert "may have been chosen after the fact" in text and "margin: 0.02 -> 0.2" in text and "is version 2" in text


def test_runs_of_another_study_come_with_its_versions(config, finished, tmp_path, instant, monkeypatch):
    monkeypatch.setattr(trials, "run_trial", None)
    run(config, tmp_path / "new", "--reuse", str(finished), "--config.margin=0.2")
    outcome = read_object(tmp_path / "new" / "results.json")
    first, second = outcome["versions"]
    assert (first["of"], second["of"]) == (finished.name, None)
    assert second["seen"] == {"runs": outcome["runs"], "others": 0, "directories": [finished.name]}
    assert "version 2" in (tmp_path / "new" / "report.md").read_text()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "runs.json").write_bytes((finished / "runs.json").read_bytes())  # its ledger is gone
    run(config, tmp_path / "newer", "--reuse", str(tmp_path / "bare"), "--config.margin=0.2")
    assert "may have been chosen after the fact" in (tmp_path / "newer" / "report.md").read_text()


def test_the_same_design_makes_no_version_and_one_that_is_changed_by_hand_is_refused(config, finished, tmp_path, instant):
    copied(finished, tmp_path)
    run(config, tmp_path, "--tracker", "jsonl")  # which is no part of the design
    assert len(preregistration.read(tmp_path)) == 1 and entries(tmp_path) == entries(finished)
    written = json.loads((tmp_path / "ledger.json").read_text())
    written["versions"][0]["design"]["margin"] = 0.2
    (tmp_path / "ledger.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="version 1 has the digest .*, which is not that of its design"):
        run(config, tmp_path, "--config.margin=0.2")


def test_a_rung_is_added_without_making_a_run_again(config, finished, tmp_path, instant, monkeypatch):
    copied(finished, tmp_path)
    before = read_object(tmp_path / "runs.json")["runs"]
    run(config, tmp_path, "--add-rung", "w32")
    after = read_object(tmp_path / "runs.json")["runs"]
    assert len(after) == len(before) + 3 * 2 * 4 and all(after[name] == result for name, result in before.items())
    assert list(read_object(tmp_path / "results.json")["sizes"])[-2:] == ["w32-x0.5", "w32-x1"]
    monkeypatch.setattr(trials, "run_trial", None)
    run(config, tmp_path)  # keeps it
    assert len(preregistration.read(tmp_path)) == 2
    with pytest.raises(UserError, match="--add-rung=w40 is not allowed: it must be one of config.more_sizes, w32"):
        run(config, tmp_path, "--add-rung", "w40")


def test_jobs_that_start_at_once_begin_at_different_runs(config, tmp_path, instant, capsys):
    ready = study_plan.make(design.read(config)).ladder.ready({})
    for number, job in enumerate((0, 3)):
        run(config, tmp_path, f"--job={job}")
        assert len(measurement.read_runs(tmp_path)) == number + 1
    done = {str(file.parent.relative_to(tmp_path)) for file in tmp_path.glob("*/*/*/result.json")}
    assert done == {ready[0].folder, ready[4].folder}  # the first has ended when the second begins
    assert "no report yet: " in capsys.readouterr().out and not (tmp_path / "results.json").exists()


def test_a_run_in_another_process_is_left_to_it(config, tmp_path, instant, monkeypatch):
    """Another process has the first run that is ready until this one has made all that it can."""
    small = replace(design.read(config), sizes={"w8": ("model.width=8", "model.depth=1")}, budgets=(), tune_at=(), seeds=2)
    planned, waited = study_plan.make(small), []
    first = planned.ladder.ready({})[0]

    def busy(study, store, trial, matched, count):
        if trial == first and not waited:
            raise Busy("another process is training in it")
        return planted(study, store, trial, matched, count)

    monkeypatch.setattr(trials, "run_trial", busy)
    monkeypatch.setattr(trials.time, "sleep", waited.append)
    result = trials.conduct(planned.ladder, open_store(tmp_path), planned.matched)
    assert waited == [trials.WAIT] and first in result and len(result) == len(measurement.read_runs(tmp_path))


def test_an_arm_that_is_settled_at_a_look_keeps_its_figures(config, finished, tmp_path, instant, capsys):
    looks = "--config.looks=(3,)"
    run(config, tmp_path, looks, "--plan")
    said = "looks      after 3 of 4 pairs: an arm with a verdict at every rung gets no more. Of 72"
    assert said in capsys.readouterr().out
    run(config, tmp_path, looks)
    outcome, whole = (read_object(folder / "results.json") for folder in (tmp_path, finished))
    assert outcome["runs"] == whole["runs"] - 3 * 6  # the fourth pair of two arms and of the baseline at six rungs
    for arm, each in outcome["ladder"].items():
        assert each["look"] == {"pairs": 3, "level": pytest.approx(0.0193, abs=1e-4)} and each["verdict"] != "undecided"
        assert each["difference"]["mean"] == pytest.approx(whole["ladder"][arm]["difference"]["mean"], abs=3 * NOISE)
    text = (tmp_path / "report.md").read_text()
    assert text.count("settled after 3 of 4 pairs") == 2 and "- looks: after 3 pairs at 1.93%, 4 pairs at 3.07%" in text
    (version,) = preregistration.read(tmp_path)
    assert version["design"]["looks"] == [3] and "looks" not in preregistration.read(finished)[0]["design"]
    run(config, tmp_path, "--config.looks=()")  # a new version of the rule, which makes the runs that are left
    assert read_object(tmp_path / "results.json")["runs"] == whole["runs"] and len(preregistration.read(tmp_path)) == 2


def test_what_the_ledger_keeps_has_no_result_of_a_run(finished):
    (version,) = preregistration.read(finished)
    assert version["seen"] == {"runs": [], "others": 0, "directories": []}
    assert version["design"]["margin"] == 0.02 and MADE["date"] == "" and version["date"] > "2026"
