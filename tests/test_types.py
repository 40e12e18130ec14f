"""The types: which modules mypy checks, and how strictly. `make types` runs it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
OVERRIDES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
STRICT = set(OVERRIDES[0]["module"])


def file_of(module: str) -> Path:
    """The file of a module of the package or of the tests."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_strict_module_exists_and_no_module_is_left_out():
    assert not [module for module in STRICT if not file_of(module).is_file()]
    assert len(OVERRIDES) == 1 and not any(each.get("ignore_errors") for each in OVERRIDES)


def test_the_names_of_the_package_are_those_of_its_stub_and_come_from_strict_modules():
    from xfresearch import _HOMES

    stub = (ROOT / "xfresearch" / "__init__.pyi").read_text()
    names = re.findall(r"^from xfresearch\.([\w.]+) import (\w+) as \2$", stub, re.M)
    assert {name: module for module, name in names} == _HOMES
    assert {f"xfresearch.{module}" for module in _HOMES.values()} <= STRICT


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "xfresearch" / "py.typed").is_file()
