"""The progress of a study."""

from contextlib import contextmanager
from dataclasses import replace

from xfresearch.studies import conducting, design, plan
from xfresearch.studies.cells import cells, extensions
from xfresearch.studies.running import open_store


def test_the_progress_counts_rates_beyond_the_grid(config, tmp_path, monkeypatch):
    """Larger rates are always better here, so that each arm tries all that the study allows."""
    chosen = replace(design.read(config), extensions=2)
    solved, store, shown, found = plan.make(chosen).matched, open_store(tmp_path), [], {}
    stage = conducting.stage

    @contextmanager
    def recorded(*arguments):
        with stage(*arguments) as progress:
            shown.append(progress)
            yield progress

    def run_trial(study, store, trial, matched, count):
        count(matched.config.steps)
        assert shown[-1].done <= shown[-1].total
        found[trial] = {"evaluation": {"bits_per_byte": 5 - trial.rate}, "seconds": {"step": 1.0}}
        return found[trial]

    monkeypatch.setattr(conducting, "stage", recorded)
    monkeypatch.setattr(conducting, "run_trial", run_trial)
    conducting.conduct(chosen, store, solved, cells(chosen))
    beyond = extensions(chosen, found)
    assert len(beyond) == chosen.extensions * len(chosen.arms) > 0
    monkeypatch.setattr(conducting, "results", lambda *_: found)
    monkeypatch.setattr(conducting, "_keep_runs", lambda *_: found)
    conducting.conduct(chosen, store, solved, cells(chosen))  # it has all results from the start
    assert all(each.done == each.total == 12 * len(found) for each in shown)
