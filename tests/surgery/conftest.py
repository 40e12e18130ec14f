"""The daily run has the first case of each test that compiles models, and every refusal; `long` has the other cases."""

from pathlib import Path

import pytest

QUICK = ("refus", "term", "mistake")  # parts of the names of tests that compile nothing


@pytest.hookimpl(tryfirst=True)  # before those with a mark are deselected
def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        if item.path.parent != Path(__file__).parent or any(word in item.name for word in QUICK):
            continue
        if item.function in seen or "certificate" in item.name and item.path.name != "test_chains.py":
            item.add_marker(pytest.mark.long)
        seen.add(item.function)
