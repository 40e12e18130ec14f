"""Every named study runs from end to end at :tiny."""

from pathlib import Path

import pytest

from tests.studies.tiny import run

FILES = [file for file in sorted(Path("configs/studies").glob("*.py")) if file.stem not in ("__init__", "common")]


@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_tiny_study_reports_that_it_shows_nothing(file, tmp_path):
    run(["--config", f"{file}:tiny"], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "it shows nothing about the question" in text and "no verdict" not in text
    assert (tmp_path / "report.html").exists()
