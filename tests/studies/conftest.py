"""The config file of a study of two tiny models."""

import pytest

from tests.studies.tiny import FILE


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("config") / "faster.py"
    file.write_text(FILE)
    return ["--config", str(file)]
