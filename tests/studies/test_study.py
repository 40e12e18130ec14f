"""A tiny study from end to end: planned, killed, resumed, reported."""

import csv
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.studies.tiny import fake_times, run
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object, write_json
from xfresearch.studies import design, estimates, measurement, report, study_plan, trials
from xfresearch.studies.allocation import Cell
from xfresearch.studies.trials import open_store
from xfresearch.study import main as study_main
from xfresearch.training import workdir
from xfresearch.training.metrics import read_metrics


def without_times(results: dict) -> dict:
    """What must be equal in two runs of one study."""
    size = results["sizes"]["tiny"]
    shares = {name: arm.get("saved", {}) | {"seconds": 0} for name, arm in size["arms"].items()}
    arms = {name: arm | {"seconds": 0, "saved": shares[name]} for name, arm in size["arms"].items()}
    return results | {"sizes": size | {"arms": arms}, "seconds": 0, "shares": 0, "made": 0, "versions": 0}


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        fake_times(patch, {"base": 1.0, "parallel": 0.75})
        run(config, folder)
    return folder


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(trials, "run_trial", None)


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_study_that_is_killed_or_stopped_resumes_and_reports_the_same(config, finished, tmp_path, sent):
    (tmp_path / "seconds.json").write_bytes((finished / "seconds.json").read_bytes())  # it need not time updates again
    command = [sys.executable, "-m", "xfresearch.study", *config, "--workdir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("tiny/base/*-seed-1/metrics.jsonl")):  # the fourth run has begun
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(sent)
    # Told to stop between two runs, it ends at once; in a run, it saves.
    assert process.wait(60) in ((-sent,) if sent == signal.SIGKILL else (-sent, 128 + sent))
    assert not (tmp_path / "results.json").exists()
    run(config, tmp_path)
    assert without_times(read_object(tmp_path / "results.json")) == without_times(read_object(finished / "results.json"))


def test_the_report_is_made_of_the_results(finished):
    text = (finished / "report.md").read_text()
    assert text.startswith("# Is it faster") and "it shows nothing" in text and "| parallel |" in text
    page = (finished / "report.html").read_text()
    assert "<svg" in page and "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    results = read_object(finished / "results.json")
    assert list(results["sizes"]["tiny"]["arms"]) == ["base", "parallel"]


def test_checkpoints_are_removed_and_curves_are_kept(finished):
    results = sorted(finished.glob("tiny/*/*/result.json"))
    assert len(results) == 2 * 4 and not list(finished.glob("tiny/*/*/checkpoints"))
    assert all(json.loads(file.read_text())["curve"] for file in results)


def test_a_curve_is_of_one_text_and_the_metric_of_another(config, finished):
    chosen, ladder, solved = design_of(config)
    measured = trials.results(ladder, open_store(finished), solved)
    evaluation = next(iter(solved.values())).config.evaluation
    for trial, result in measured.items():
        assert result["evaluation"]["units"] == evaluation.final_sequences == 16 != evaluation.sequences
        rows = read_metrics(finished / trial.folder / "metrics.jsonl")
        assert {row["units"] for row in rows if row["kind"] == "evaluation"} == {evaluation.sequences}
        values, sizes = result["blocks"]["values"], result["blocks"]["sizes"]
        assert len(sizes) == 16 and sum(sizes) == result["evaluation"]["bytes"]
        assert sum(values) / sum(sizes) == pytest.approx(result["evaluation"]["bits_per_byte"], rel=1e-6)


def test_what_a_text_adds_to_all_runs_is_no_error_of_their_difference(config, finished):
    chosen, ladder, solved = design_of(config)
    result = trials.results(ladder, open_store(finished), solved)
    rng, sizes_B = np.random.default_rng(0), np.full(64, 100)
    text_B, errors = rng.normal(200, 20, 64), {"base": 0.5, "parallel": 0.5}
    for trial in result:
        values_B = text_B + rng.normal(0, errors[trial.cell.arm], 64)
        result[trial] = result[trial] | {"blocks": {"values": list(values_B), "sizes": list(sizes_B)}}
    arm = estimates.outcome_of(ladder, solved, result)["sizes"]["tiny"]["arms"]["parallel"]
    assert arm["sampling_error"] == pytest.approx(20 / 100 / 8, rel=0.3)
    of_two_means = math.hypot(0.5, 0.5) / math.sqrt(2) / 100 / 8  # of two runs each
    assert arm["difference_sampling_error"] == pytest.approx(of_two_means, rel=0.3)


def test_an_arm_that_gains_nothing_by_its_size_is_named(config, finished):
    """Where its learning rate was not tried."""
    chosen, ladder, solved = design_of(config)
    template = next(iter(trials.results(ladder, open_store(finished), solved).values()))
    chosen = replace(chosen, seeds=2, sizes={"small": chosen.sizes["tiny"], "large": ("model.width=24", "steps=12")})
    planned = study_plan.make(chosen)
    ready, collected = planned.ladder.ready({}), {}
    while ready:
        for trial in ready:
            value = 2 - 1e-3 * trial.seed - (0 if trial.tunes else 1e-4 * (trial.cell.rung == "small"))
            collected[trial] = template | {"evaluation": {"bits_per_byte": value}}
        ready = planned.ladder.ready({each: result["evaluation"]["bits_per_byte"] for each, result in collected.items()})
    results = estimates.outcome_of(planned.ladder, planned.matched, collected)
    assert not any("gains nothing" in line for line in report.notes(results))  # each size has its own rates
    tuned = results | {"study": results["study"] | {"tune_at": ["small"]}}
    lines = [line for line in report.notes(tuned) if "gains nothing" in line]
    assert [line.split()[0] for line in lines] == ["base", "parallel"]
    tuned["study"]["tune_at"] = ["large"]
    assert not any("gains nothing" in line for line in report.notes(tuned))
    failed = next(trial for trial in collected if trial.cell == Cell("large", "parallel") and not trial.tunes)
    collected[failed] = {**template, "evaluation": {}, "diverged": "the loss is not finite"}
    results = estimates.outcome_of(planned.ladder, planned.matched, collected)
    assert results["ladder"] == {} and "both sizes" not in report.markdown(report.parts_of(results))
    assert report.verdicts(results)[0].startswith("parallel: no verdict at large: a run diverged (large/parallel/")


def test_curves_of_the_accuracy_are_of_its_errors(config, finished):
    """An arm that is worse at every point never reaches the baseline, and saves nothing."""
    chosen, ladder, solved = design_of(config)
    measured = trials.results(ladder, open_store(finished), solved)
    for trial, result in measured.items():
        accuracy = 0.7 if trial.cell.arm == "parallel" else 0.8
        if trial.tunes:
            accuracy = 1 - result["evaluation"]["bits_per_byte"] / 100  # the same rates are best
        curve = [(step, accuracy * step / 12) for step in (4, 8, 12)]
        measured[trial] = result | {"evaluation": {"accuracy": accuracy}, "curve": curve}
    of_errors = ladder._replace(study=replace(chosen, metric="accuracy"))
    arm = estimates.outcome_of(of_errors, solved, measured)["sizes"]["tiny"]["arms"]["parallel"]
    assert arm["curve"][-1][1] == pytest.approx(0.3) and arm["verdict"] == "worse"
    saved, lost = arm["saved"]["training_flops"]
    assert math.isnan(saved) and lost > 0


def test_runs_that_a_design_does_not_need_now_stay_in_the_file(config, finished, tmp_path):
    chosen, ladder, solved = design_of(config)
    for name in ("study.json", "runs.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    before = measurement.read_runs(tmp_path)
    longer = {cell: each._replace(config=replace(each.config, steps=13)) for cell, each in solved.items()}
    trial = next(iter(trials.results(ladder, open_store(finished), solved)))
    other = before[next(iter(before))] | {"fingerprint": "other"}
    result = other | {"fingerprint": measurement.fingerprint(measurement.config_of_trial(trial, longer[trial.cell].config))}
    write_json(tmp_path / trial.folder / "result.json", result)
    trials._keep_runs(ladder, open_store(tmp_path), longer, {})
    assert measurement.read_runs(tmp_path) == before | {result["fingerprint"]: result}


def written(folder) -> dict[str, str]:
    """The files that are made of results.json alone."""
    names = ("report.md", "differences.csv", "differences.tex", "differences.svg")
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}


def test_the_report_is_written_again_without_data(finished, tmp_path, capsys):
    (tmp_path / "results.json").write_bytes((finished / "results.json").read_bytes())
    study_main(["--report", "--workdir", str(tmp_path)])
    assert written(tmp_path) == written(finished) and "differences.tex" in written(tmp_path)
    sizes = read_object(finished / "results.json") | {"sizes": {}}
    for wrong in ({"study": {}}, {"study": []}, sizes):
        write_json(tmp_path / "results.json", wrong)
        with pytest.raises(UserError, match=r"results.json is damaged or of another version \(\w+: .*: run the study"):
            study_main(["--report", "--workdir", str(tmp_path)])
    for more in (["--plan"], ["--config.margin=0.5"]):
        with pytest.raises(UserError, match=f"{more[0]} is not allowed with --report"):
            study_main(["--report", "--workdir", str(tmp_path), *more])


def test_files_for_a_paper_have_arms_without_a_verdict(config, finished, tmp_path):
    """Whether a tiny model beats the frequencies of tokens is luck, so they are set here: first all arms do, then none."""
    _, ladder, solved = design_of(config)
    result = trials.results(ladder, open_store(finished), solved)
    for unigram, decided in ((math.inf, True), (1e-3, False)):
        write_json(tmp_path / "results.json", estimates.outcome_of(ladder, solved, result, unigram={"tiny": unigram}))
        study_main(["--report", "--workdir", str(tmp_path)])
        files = written(tmp_path)
        (row,) = csv.DictReader(files["differences.csv"].splitlines())
        assert (row["rung"], row["arm"], row["difference"] != "") == ("tiny", "parallel", decided)
        assert (row["verdict"] == "no verdict") == (r"tiny & parallel &  &  & no verdict \\" in files["differences.tex"])
        assert (row["verdict"] != "no verdict") == ("differences.svg" in files) == decided
        assert ("| parallel | " in files["report.md"]) and ("| no verdict |" in files["report.md"]) != decided


def test_a_finished_study_trains_nothing_again(config, finished, no_training):
    run(config, finished)


def test_results_of_another_config_do_not_count(config, finished):
    chosen, ladder, solved = design_of(config)
    result = trials.results(ladder, open_store(finished), solved)
    trial, cell = next(iter(result)), next(iter(solved))
    store, other = open_store(finished), replace(solved[cell].config, steps=13)
    assert store.find(chosen, trial, solved[cell].config) and store.find(chosen, trial, other) is None
    text = replace(solved[cell].config.evaluation, final_sequences=8)
    assert store.find(chosen, trial, replace(solved[cell].config, evaluation=text)) is None
    trial = next(each for each in result if each.cell == cell and not each.tunes)  # only compared runs have probes
    assert store.find(chosen, trial, solved[cell].config)
    for change in ({"probes": ("norms.spread",)}, {"metric": "loss"}):  # a run that measured less, or another metric
        assert store.find(replace(chosen, **change), trial, solved[cell].config) is None


def test_probes_are_measured_on_runs_that_are_compared(config, finished):
    chosen, ladder, solved = design_of(config)
    actual = trials.results(ladder, open_store(finished), solved)
    measured = {(trial.tunes, *result["probes"]) for trial, result in actual.items()}
    assert measured == {(True,), (False, *chosen.probes)}


def test_runs_that_read_other_data_are_refused(config, finished, monkeypatch, no_training):
    chosen, ladder, solved = design_of(config)
    measured = trials.results(ladder, open_store(finished), solved)
    trial, result = list(measured.items())[-1]
    assert "tokenizer" in result["data"] and any(name.startswith("train split of") for name in result["data"])
    measured[trial] = result | {"data": result["data"] | {"tokenizer": "c0ffee"}}
    with pytest.raises(UserError, match=f"{trial.folder}: its tokenizer has the digest c0ffee, and that of the other runs"):
        estimates.outcome_of(ladder, solved, measured)
    monkeypatch.setattr(trials, "results", lambda *_: measured)
    with pytest.raises(UserError, match="its tokenizer has the digest c0ffee"):  # before anything runs
        trials.conduct(ladder, open_store(finished), solved)


def test_the_report_says_where_and_with_which_versions_runs_were_made(config, finished, tmp_path):
    chosen, ladder, solved = design_of(config)
    measured = trials.results(ladder, open_store(finished), solved)
    one = estimates.outcome_of(ladder, solved, measured)
    assert not any("sets of versions" in line for line in report.notes(one))
    trial, result = list(measured.items())[-1]
    made = result["made"]
    machine = made["machine"] | {"cpu": "another", "matmul_precision": "highest"}
    other = {"machine": machine, "versions": made["versions"] | {"jax": "0.0.1"}}
    several = estimates.outcome_of(ladder, solved, measured | {trial: result | {"made": made | other}})
    assert "2 sets of versions" in "\n".join(report.notes(several))
    assert "jax 0.0.1" in report.markdown(report.parts_of(several))
    first, second = several["made"]["runs"]
    assert first.startswith("7: ") and second.startswith("1: ") and "another" in second
    assert "precision" not in first and second.endswith("matmul precision highest")


@pytest.mark.parametrize(
    "change, message",
    [
        ("multiple=4", r"config.multiple=4 is not allowed with --workdir=.*, which began with 8"),
        ("rates=(1e-3,1e-2)", r"config.rates=\[0.001, 0.01\] is not allowed"),
        ("arms.base=('model.width=8',)", r"config.arms.base=\['model.width=8'\] is not allowed with .* began with \[\]"),
        ("sizes.tiny=('model.width=8',)", r"config.sizes.tiny=.* is not allowed"),
    ],
)
def test_a_design_does_not_change_after_the_runs(config, finished, change, message):
    before = {path: path.read_bytes() for path in finished.rglob("*.json*")}
    for more in ([], ["--plan"]):  # which would time the arms of another design
        with pytest.raises(UserError, match=message):
            run(config, finished, f"--config.{change}", *more)
    assert all(path.read_bytes() == kept for path, kept in before.items())


def test_jobs_of_an_array_make_one_run_each(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workdir, "in_bucket", lambda path: True)  # runs are claimed, and not locked
    for number, name in enumerate(("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(number))
            run(config, tmp_path, "--job=auto")
        assert len(measurement.read_runs(tmp_path)) == number + 1
    assert "no report yet: 6 of 8 runs have not ended" in capsys.readouterr().out
    for wrong in ("8", "-1", "auto"):
        with pytest.raises(UserError, match=f"--job={wrong} is not allowed: it must be at least 0 and at most 7"):
            run(config, tmp_path, f"--job={wrong}")


def test_a_seed_that_is_missing_or_diverged_makes_no_verdict(config, finished, tmp_path):
    chosen, ladder, solved = design_of(config)
    result = trials.results(ladder, open_store(finished), solved)
    every = list(result)
    with pytest.raises(UserError, match="the study has no result of tiny/"):
        estimates.outcome_of(ladder, solved, {trial: result[trial] for trial in every[:-1]})
    broken = result | {every[-1]: result[every[-1]] | {"evaluation": {}}}
    write_json(tmp_path / "results.json", estimates.outcome_of(ladder, solved, broken))
    written = read_object(tmp_path / "results.json")
    size = written["sizes"]["tiny"]
    assert "diverged" in size["failures"]["parallel"] and "verdict" not in size["arms"]["parallel"]
    report.write(tmp_path, written)
    assert "| parallel |  |  |  |  |  | no verdict |" in (tmp_path / "report.md").read_text()
    assert "parallel" not in estimates.outcome_of(ladder, solved, result)["sizes"]["tiny"]["failures"]


def test_an_arm_that_diverges_at_every_rate_leaves_the_others_their_verdict(config, finished, tmp_path):
    chosen, ladder, solved = design_of(config)
    result = trials.results(ladder, open_store(finished), solved)
    of_parallel = {trial: result[trial] | {"evaluation": {}} for trial in result if trial.cell.arm == "parallel"}
    concluded = estimates.outcome_of(ladder, solved, result | of_parallel)
    assert concluded["sizes"]["tiny"]["failures"] == {"parallel": "a run diverged (every learning rate)"}
    write_json(tmp_path / "results.json", concluded)
    report.write(tmp_path, read_object(tmp_path / "results.json"))
    text = (tmp_path / "report.md").read_text()
    assert "parallel: no verdict: a run diverged (every learning rate)." in text
    assert "paired differences" not in text  # there are none


def test_an_arm_that_has_not_learnt_is_no_evidence(config, finished):
    chosen, ladder, solved = design_of(config)
    result = trials.results(ladder, open_store(finished), solved)
    size = estimates.outcome_of(ladder, solved, result, unigram={"tiny": 1e-3})["sizes"]["tiny"]
    assert set(size["failures"]) == set(chosen.arms) and not any("verdict" in arm for arm in size["arms"].values())
    assert estimates.outcome_of(ladder, solved, result, unigram={"tiny": math.inf})["sizes"]["tiny"]["failures"] == {}


def design_of(config):
    planned = study_plan.make(design.read(config))
    return planned.ladder.study, planned.ladder, planned.matched


def test_runs_of_another_study_are_not_trained_again(config, finished, tmp_path, no_training):
    with pytest.raises(UserError, match=f"--reuse={tmp_path} is not allowed: it must be the directory of a study"):
        run(config, tmp_path / "new", "--reuse", str(tmp_path))
    (tmp_path / "runs.json").write_text("{}")
    with pytest.raises(UserError, match="runs.json: runs is missing"):
        run(config, tmp_path / "new", "--reuse", str(tmp_path))
    run(config, tmp_path / "new", "--reuse", str(finished), "--config.question=Another?")
    other = read_object(tmp_path / "new" / "results.json")
    assert without_times(other)["sizes"] == without_times(read_object(finished / "results.json"))["sizes"]


def test_the_design_and_the_results_of_runs_are_enough_to_go_on(config, finished, tmp_path, no_training):
    for name in ("study.json", "runs.json", "seconds.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    run(config, tmp_path)
    assert read_object(tmp_path / "results.json")["sizes"] == read_object(finished / "results.json")["sizes"]


def test_seconds_are_those_of_updates_that_were_timed(config, finished, tmp_path, capsys):
    updates = read_object(finished / "seconds.json")["updates"]
    timed = {cell: each["seconds"] for cell, each in updates.items()}
    arms = read_object(finished / "results.json")["sizes"]["tiny"]["arms"]
    assert {f"tiny/{name}": arm["seconds"] / arm["steps"] for name, arm in arms.items()} == pytest.approx(timed)
    for name in ("study.json", "runs.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    run(config, tmp_path)
    results = read_object(tmp_path / "results.json")
    assert {arm["seconds"] for arm in results["sizes"]["tiny"]["arms"].values()} == {None}
    assert "There are no seconds" in (tmp_path / "report.md").read_text()
    assert "by seconds of training" not in (tmp_path / "report.html").read_text()
    assert "updates were not timed;" in capsys.readouterr().out
    run(config, tmp_path, "--time")  # which times them
    assert "minutes of training for what is left, where the updates were timed" in capsys.readouterr().out


def test_existing_runs_have_a_report_too(finished, tmp_path):
    runs = [str(finished / "tiny" / "base" / f"rate-{rate}-seed-1000") for rate in (0.01, 0.03)]
    run([], tmp_path / "both", "--runs", *runs)
    page = (tmp_path / "both" / "report.html").read_text()
    assert "optimizer.learning_rate" in page and "FLOPs of training" in page and "seconds of training" in page
    for folder, owner in ((finished, "a study"), (runs[0], "a run")):
        with pytest.raises(UserError, match=f"--workdir={folder} is not allowed with --runs: {owner} has its report there"):
            run([], folder, "--runs", *runs)
    with pytest.raises(UserError, match="--workdir=.*/results.json/report.html cannot be written"):
        run([], tmp_path / "both" / "results.json", "--runs", *runs)
    for flags, named in ((["--plan"], "--plan"), (["--html", "other.html"], "--html"), (["--json=x"], "--json=x")):
        with pytest.raises(UserError, match=f"{named} is not allowed with --runs"):
            run([], tmp_path / "both", "--runs", *runs, *flags)
