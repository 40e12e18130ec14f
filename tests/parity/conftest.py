"""Parity tests say how large their errors were: `parity` notes one, the end of the session prints them (docs/parity.md)."""

import importlib.metadata

import pytest

from tests.tolerances import TOLERANCE

ERRORS = pytest.StashKey[dict]()


@pytest.fixture
def parity(request):
    """Notes the relative error of a comparison with a library, and fails where it is above the dtype's tolerance."""

    def note(library: str, name: str, dtype: str, error: float):
        request.config.stash.setdefault(ERRORS, {})[(library, name, dtype)] = error
        assert error < TOLERANCE[dtype], f"{name} differs from {library} by {error:.1e}"

    return note


def pytest_terminal_summary(terminalreporter, config):
    errors = config.stash.get(ERRORS, {})
    rows = {(library, name): {} for library, name, _ in errors}
    for (library, name, dtype), error in errors.items():
        rows[library, name][dtype] = f"{error:.1e}"
    for (library, name), row in rows.items():
        version = importlib.metadata.version(library)
        cells = [name, f"{library} {version}", row.get("float32", "-"), row.get("float64", "-")]
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
