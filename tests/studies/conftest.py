"""The config file of a study of two tiny models, whose updates are timed in one turn."""

import pytest

from tests.studies.tiny import FILE
from xfresearch.training import timing


@pytest.fixture(scope="module", autouse=True)
def one_turn():
    """Other tests keep the machine busy, so turns would not agree. No test needs them to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "TURNS", 1)
        patch.setattr(timing, "MOST_TURNS", 1)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("config") / "faster.py"
    file.write_text(FILE)
    return ["--config", str(file)]
