"""Parity tests say how large their errors were: `parity` notes one, the end of the session prints them (docs/parity.md)."""

from importlib.metadata import version

import pytest

from tests.tolerances import TOLERANCE
from xfresearch.hardware import describe_machine

ERRORS = pytest.StashKey[dict]()


@pytest.fixture
def parity(request):
    """Notes the relative error of a comparison with a library, the largest where a name comes twice, and fails where it is
    above the dtype's tolerance."""

    def note(library: str, name: str, dtype: str, error: float):
        errors, key = request.config.stash.setdefault(ERRORS, {}), (library, name, dtype)
        errors[key] = max(error, errors.get(key, 0.0))
        assert error < TOLERANCE[dtype], f"{name} differs from {library} by {error:.1e}"

    return note


@pytest.fixture(autouse=True)
def fresh_jax():
    """Reading a float64 folder switches JAX to 64 bits: back to what it was. Every model has programs of its own, of which
    one process cannot keep those of all (it ended in a segmentation fault after 400 tests)."""
    import jax

    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)
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
    """What the errors were found with and on: read from the session, since they are copied into a page."""
    import torch

    found = describe_machine()
    return f"torch {torch.__version__}, jax {version('jax')}, {found['cores']} cores, {found['cpu']}"
