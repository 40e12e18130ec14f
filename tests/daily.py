"""Which cases of a test run every day."""

from collections.abc import Collection, Iterable

import pytest


def daily(chosen: Collection, among: Iterable) -> list:
    """Parameters of a test: all of `among`, a name or a tuple each. Those that are not chosen have the marker `long`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=() if case in chosen else pytest.mark.long)
        for case in among
    ]
