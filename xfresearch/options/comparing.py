"""Differences between two configs, and the fingerprint of one."""

import hashlib
import json
from collections.abc import Iterable
from functools import cache

from xfresearch.options.fields import leaves

RESULT = ("function", "initialisation", "training", "precision")  # options that decide one of these change the result


def differences(old, new, key: str = "config", deciding: Iterable[str] = ()) -> list[str]:
    """Lines 'config.key: old -> new' for every option in which two configs differ.

    If `deciding` is given, it compares only the options that decide one of these things (fields.py).
    """
    wanted = set(deciding)
    before = _values(old, key, wanted)
    after = _values(new, key, wanted)
    return [
        f"{name}: {before.get(name, '(absent)')!r} -> {after.get(name, '(absent)')!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name, ...) != after.get(name, ...)
    ]


def _values(config, key: str, wanted: set[str]) -> dict:
    return {f"{key}.{leaf.path}": leaf.value for leaf in leaves(config) if not wanted or leaf.decides in wanted}


def flat(config) -> dict:
    """{dotted path: value} of every option."""
    return {leaf.path: leaf.value for leaf in leaves(config)}


def fingerprint(config, without: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> str:
    """A digest of the options that determine a run's result. Options at the paths `without` are left out, and options whose
    paths begin with one of `also` are added. An option at its default does not count, so that results keep their
    fingerprints when an option is added to the code."""
    usual = _usual(config.__class__)
    described = {
        leaf.path: leaf.value
        for leaf in leaves(config)
        if (leaf.decides in RESULT and leaf.path not in without or leaf.path.startswith(also))
        and (leaf.value != usual[leaf.path] if leaf.path in usual else leaf.chooses or leaf.value != leaf.default)
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _usual(kind: type) -> dict:
    """{dotted path: value} of every option of a config at its defaults."""
    return flat(kind())
