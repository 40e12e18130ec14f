import pytest

from tests.launch.stand_ins import Launcher


@pytest.fixture
def launcher(tmp_path) -> Launcher:
    return Launcher(tmp_path / "stand-ins")
