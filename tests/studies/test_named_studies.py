"""Every named study runs from end to end at :tiny."""

from pathlib import Path

import pytest

from tests.studies.tiny import run
from xfresearch.runtime.files import read_object

FILES = [file for file in sorted(Path("configs/studies").glob("*.py")) if file.stem not in ("__init__", "common")]


@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_tiny_study_reports_that_it_shows_nothing(file, tmp_path):
    run(["--config", f"{file}:tiny"], tmp_path)
    assert "it shows nothing about the question" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.html").exists()
    results = read_object(tmp_path / "results.json")
    failures, arms = (results["sizes"]["tiny"][name] for name in ("failures", "arms"))
    # An arm has a verdict, unless it or the baseline does not beat the frequencies of tokens, which is luck at this size.
    assert all(reason.startswith("it has not learnt") for reason in failures.values())
    undecided = {name for name, arm in arms.items() if "verdict" not in arm} - {baseline := results["study"]["baseline"]}
    assert undecided == (arms.keys() if baseline in failures else failures.keys()) - {baseline}
