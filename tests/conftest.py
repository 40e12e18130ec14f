"""What every test shares: JAX on the CPU unless told otherwise, our own warnings as errors, the data that is not in git."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    # Warnings that other libraries raise in their own code are theirs.
    config.addinivalue_line("filterwarnings", r"error:::(xfresearch|tests)\b")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets, which lie beside the repository and are never committed."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("real data (../shared/data) is not on this machine")
    return path
