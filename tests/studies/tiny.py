"""A study of two tiny models, and its command."""

import json

from xfresearch.studies import matching
from xfresearch.study import main as study_main

FILE = """
from xfresearch.configs.studies import common


def get_config():
    study = common.base("tiny")
    study.question, study.rule = "Is it faster to do both at once?", "It is, if the verdict is 'better'."
    study.arms = {"parallel": ("model.blocks.main.layout=parallel",), "base": ()}
    study.baseline = "base"
    study.sizes.tiny = ("model.width=16", "model.depth=1", "steps=12")
    return study
"""


MADE = {"commit": "", "date": "", "machine": {"cpu": "", "cores": 1, "devices": ""}, "versions": {}}  # of a run


def run(config: list[str], workdir, *more: str) -> None:
    study_main([*config, "--workdir", str(workdir), *more])


def entries(folder) -> list[dict]:
    """What a study sent to the tracker 'jsonl'."""
    return [json.loads(line) for line in (folder / "tracker" / "entries.jsonl").read_text().splitlines()]


def time_nothing(monkeypatch) -> None:
    """Updates of all arms take a second."""
    monkeypatch.setattr(matching, "seconds_per_update", lambda config: 1.0)
    monkeypatch.setattr(matching, "relative_seconds", lambda config, baseline: 1.0)


def fake_times(monkeypatch, speeds: dict[str, float]) -> list[str]:
    """Updates of the arms take these seconds. A config of the tiny study is told by its layout. Returns a list that will
    have the arms in the order in which they are timed."""
    timed = []

    def seconds(config) -> float:
        layout = config.model.blocks["main"].layout
        timed.append({"pre_norm": "base"}.get(layout, layout))
        return speeds[timed[-1]]

    monkeypatch.setattr(matching, "seconds_per_update", seconds)
    monkeypatch.setattr(matching, "relative_seconds", lambda config, baseline: seconds(config) / seconds(baseline))
    return timed
