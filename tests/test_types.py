"""The types: which modules mypy checks, and how strictly. `make types` runs it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNCHECKED = 67  # modules that have errors still. Lower it when you mend one, and never raise it.
OVERRIDES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
STRICT, RELAXED = (set(each["module"]) for each in OVERRIDES)


def file_of(module: str) -> Path:
    """The file of a module of the package or of the tests."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_the_list_of_modules_with_errors_only_gets_shorter():
    assert len(RELAXED) <= UNCHECKED


def test_every_listed_module_exists_and_no_strict_one_is_relaxed():
    assert not [module for module in STRICT | RELAXED if not file_of(module).is_file()]
    assert not STRICT & RELAXED


def test_the_names_of_the_package_are_those_of_its_stub_and_come_from_strict_modules():
    from xfresearch import _HOMES

    stub = (ROOT / "xfresearch" / "__init__.pyi").read_text()
    names = re.findall(r"^from xfresearch\.([\w.]+) import (\w+) as \2$", stub, re.M)
    assert {name: module for module, name in names} == _HOMES
    assert {f"xfresearch.{module}" for module in _HOMES.values()} <= STRICT


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "xfresearch" / "py.typed").is_file()
