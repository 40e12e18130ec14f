"""What every test shares: JAX on the CPU unless told otherwise, our own warnings as errors, the data that is not in git."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile hundreds of small programs and run each a few times: compile them quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
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


@pytest.fixture
def x64():
    """JAX with 64 bits."""
    import jax

    with jax.enable_x64(True):
        yield
