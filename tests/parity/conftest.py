"""Parity errors: the `parity` fixture records one, the end of the session prints all (docs/parity.md)."""

from importlib.metadata import version

import pytest

from tests.tolerances import TOLERANCE
from xfresearch.runtime.hardware import describe_machine

ERRORS = pytest.StashKey[dict]()


@pytest.fixture
def parity(request):
    """Records the relative error of a comparison with a library, and fails if it is above the dtype's tolerance. If a
    name is recorded several times, the largest error is kept."""

    def record(library: str, name: str, dtype: str, error: float):
        errors = request.config.stash.setdefault(ERRORS, {})
        key = (library, name, dtype)
        errors[key] = max(error, errors.get(key, 0.0))
        assert error < TOLERANCE[dtype], f"{name} differs from {library} by {error:.1e}"

    return record


@pytest.fixture(autouse=True)
def fresh_jax():
    """Clears JAX's caches: every model compiles new programs, and a process that kept them all ended in a segmentation
    fault after 400 tests."""
    import jax

    yield
    jax.clear_caches()


def pytest_terminal_summary(terminalreporter, config):
    errors = config.stash.get(ERRORS, {})
    rows = {(library, name): {} for library, name, _ in errors}
    for (library, name, dtype), error in errors.items():
        rows[library, name][dtype] = f"{error:.1e}"
    for (library, name), row in rows.items():
        cells = [name, f"{library} {version(library)}", row.get("float32", "-"), row.get("float64", "-")]
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    if errors:
        terminalreporter.write_line(machine())


def machine() -> str:
    """Library versions and hardware of this session, for docs/parity.md."""
    import torch

    result = describe_machine()
    return f"torch {torch.__version__}, jax {version('jax')}, {result['cores']} cores, {result['cpu']}"
