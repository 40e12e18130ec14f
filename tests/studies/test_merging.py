"""Two studies become one: a config with the arms of both takes the runs of their directories."""

from tests.studies.tiny import FILE, MADE, run, time_nothing
from xfresearch.runtime.files import read_object, write_json, write_rows
from xfresearch.studies import design, measurement, study_plan, trials
from xfresearch.studies.allocation import Trial


def study_of(arms: str, folder) -> list[str]:
    """The config of the tiny study with other arms beside the base, and without probes."""
    file = folder / "study.py"
    file.write_text(FILE.replace('"parallel": ("model.blocks.main.layout=parallel",)', arms))
    return ["--config", str(file), "--config.probes=()"]


def pretend(study, store, trial, matched, count) -> dict:
    """A run whose metric follows from its config and its seed, without training."""
    config = measurement.config_of_trial(trial, matched.config)
    value = 1.0 + int(measurement.fingerprint(config), 16) / 2**64
    result = {"fingerprint": measurement.fingerprint(config), "metric": study.metric, "evaluation": {study.metric: value}}
    result |= {"held_out": measurement._held_out(matched.config), "blocks": {"values": [value, 1.0], "sizes": [1, 1]}}
    spent = {"step": 1.0, "evaluation": 0.1, "metric": 0.1, "probes": 0.0}
    result |= {"made": MADE, "seconds": spent, "curve": [(12, value)]}
    write_json(store.folder / trial.folder / "result.json", result)
    return result


def test_a_study_with_the_arms_of_two_others_trains_nothing(tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    monkeypatch.setattr(trials, "run_trial", pretend)
    arms = [f'"{layout}": ("model.blocks.main.layout={layout}",)' for layout in ("parallel", "no_norm_between")]
    folders = [tmp_path / name for name in ("first", "second", "both")]
    for folder, each in zip(folders, (*arms, ", ".join(arms)), strict=True):
        folder.mkdir()
        if folder.name == "both":
            monkeypatch.setattr(trials, "run_trial", None)
        run(study_of(each, folder), folder, *(["--reuse", *map(str, folders[:2])] if folder.name == "both" else []))
    first, second, both = (read_object(folder / "results.json")["sizes"]["tiny"]["arms"] for folder in folders)
    for actual, arm in ((first, "parallel"), (second, "no_norm_between"), (first, "base")):
        assert both[arm]["values"] == actual[arm]["values"] and both[arm]["curve"] == actual[arm]["curve"]
    differences = [each["parallel"]["difference"] for each in (both, first)]
    assert len({each["measured"] for each in differences}) == 1
    assert differences[0]["low"] != differences[1]["low"]  # intervals hold for all arms of a study


def test_a_result_that_measured_enough_is_found_in_any_directory(config, tmp_path):
    chosen = design.read(config)
    cell, matched = next(iter(study_plan.make(chosen).matched.items()))
    trial, folders = Trial(cell, 1e-2, 0), [tmp_path / name for name in ("probes", "none")]
    wanted = measurement.fingerprint(measurement.config_of_trial(trial, matched.config))
    result = {"fingerprint": wanted, "metric": chosen.metric, "held_out": measurement._held_out(matched.config)}
    result |= {"evaluation": {}, "seconds": {}, "made": MADE}
    for folder, probes in zip(folders, (dict.fromkeys(chosen.probes, 0.0), {}), strict=True):
        folder.mkdir()
        write_rows(folder / "runs.json", {wanted: result | {"probes": probes}}, "runs")
    for order in (folders, folders[::-1]):
        store = trials.open_store(tmp_path / "new", list(map(str, order)))
        assert store.find(chosen, trial, matched.config)["probes"].keys() == set(chosen.probes)
