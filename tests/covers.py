"""The mark `covers`: the test sets these options of a model to values other than their defaults.

tests/conftest.py runs marked tests in `checked`, so that a mark without a real case fails. test_discovery.py reads the
marks: an option that no variant changes needs one.
"""

import importlib
import re
from contextlib import contextmanager

import pytest

# Modules with marks.
MODULES = (
    *(f"tests.models.test_{name}" for name in ("adaptive_span", "bidirectional", "dropout", "initialisation", "moe")),
    *(f"tests.models.test_{name}" for name in ("parts", "precision")),
    "tests.training.test_routing",
)


def covered() -> set[str]:
    """The options in all marks, also in those of single cases of `parametrize`."""
    paths = set()
    for module in MODULES:
        tests = [value for name, value in vars(importlib.import_module(module)).items() if name.startswith("test_")]
        marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
        cases = [case for mark in marks if mark.name == "parametrize" for case in mark.args[1]]
        marks += [mark for case in cases for mark in getattr(case, "marks", ())]
        paths |= {path for mark in marks if mark.name == "covers" for path in mark.args}
    return paths


@contextmanager
def checked(paths: list[str]):
    """Raises AssertionError if no model created inside has another value than the default for each of these options."""
    from xfresearch.models.model_config import ModelConfig

    models = []
    init = ModelConfig.__init__

    def record(self, *args, **kwargs):
        init(self, *args, **kwargs)
        models.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelConfig, "__init__", record)
        yield
    missing = [path for path in paths if not any(is_set(model, path) for model in models)]
    assert not missing, f"marked as covered, but never set: {missing}"


def plain_path(path: str) -> str:
    """The path of an option without kinds in brackets."""
    return re.sub(r"\[\w+\]", "", path)


def is_set(model, path: str) -> bool:
    """Whether the option differs from its default. A kind in brackets must be the sublayer's kind."""
    from xfresearch.options.fields import leaves

    kind = re.search(r"\[(\w+)\]", path)
    by_name = {leaf.path: leaf for leaf in leaves(model)}
    if kind and getattr(by_name.get(f"{path[: kind.start()]}.kind"), "value", None) != kind[1]:
        return False
    leaf = by_name.get(plain_path(path))
    return leaf is not None and leaf.value != leaf.default
