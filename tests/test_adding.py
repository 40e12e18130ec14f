"""docs/adding.md, carried out in a copy of the repository: its examples are added, and its commands pass there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import copy_of_the_tree

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adding.md").read_text()
# A paragraph that ends with the name of a file, and the block under it.
BLOCK = re.compile(r"`([\w./]+)`[^`\n]*:\n\n```(python|diff)\n(.*?)^```$", re.M | re.S)
# The contracts that `-k NAME` must reach without `-m long`. A variant without new parameters has fewer.
CONTRACTS = {
    "mean_abs": {"counts", "reference"},
    "moving_average": {
        *("conversions", "counts", "equalities", "gradients", "kernels", "lowering", "options", "reference", "writes")
    },
    "layer_scale": {"conversions", "counts", "reference"},
}


def commands() -> tuple[list[str], list[str]]:
    """The commands under "Check it": those for every day, and those that take long."""
    section = PAGE.split("## Check it\n")[1].split("\n## ")[0]
    quick, slow = (text.splitlines() for text in re.findall(r"^```text\n(.*?)^```$", section, re.M | re.S))
    return quick, slow


def carry_out(tree: Path) -> None:
    """Makes the page's files, and its changes to existing ones."""
    for file, language, text in BLOCK.findall(PAGE):
        path = tree / file
        if language == "python":
            assert not path.exists(), f"{file} exists already"
            path.write_text(text)
        else:
            for hunk in text.split("@@\n"):
                path.write_text(changed(path.read_text(), hunk, file))


def changed(text: str, hunk: str, file: str) -> str:
    old, new = ("".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] in (" ", sign)) for sign in "-+")
    assert old and text.count(old) == 1, f"these lines are {text.count(old)} times in {file}:\n{old}"
    return text.replace(old, new)


def run(command: str, tree: Path) -> str:
    """The output of a command of the page in the copy, for all examples at once."""
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}: " in (tree / "Makefile").read_text()
        words = ["python", "-m", "docs.write"]
    assert words[0] in ("python", "ruff")
    words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "ruff"]
    words = [" or ".join(CONTRACTS) if word == "NAME" else word for word in words]
    verbose = os.environ | {"PYTEST_ADDOPTS": "-vv -p no:cacheprovider"}
    done = subprocess.run(words, cwd=tree, env=verbose, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = copy_of_the_tree(tmp_path_factory.mktemp("adding") / "tree")
    carry_out(tree)
    return tree


@pytest.mark.long
def test_the_examples_pass_the_checks_of_the_page(tree):
    outputs = [run(command, tree) for command in commands()[0]]
    passed = re.findall(r"^tests/contracts/test_(\w+).py::\w+\[(\S+)\] PASSED", "\n".join(outputs), re.M)
    for name, contracts in CONTRACTS.items():
        assert {contract for contract, case in passed if name in case} == contracts
    assert "`'moving_average'`" in (tree / "docs" / "data" / "tables" / "keys.md").read_text()


@pytest.mark.long
def test_the_examples_pass_the_tests_that_take_long(tree):
    """With few updates, and of `make test` only the tests that read the pages. The other test may have another tree, so the
    pages are made here, too."""
    *rest, last = commands()[1]
    assert last == "make test"
    for command in ["make docs", *rest, "python -m pytest tests/test_docs.py -k 'generated or table'"]:
        run(command, tree)


def test_a_block_that_does_not_fit_is_an_error():
    assert changed("a\nb\n", " a\n+c\n", "f") == "a\nc\nb\n"
    assert changed("a\nb\n", "-a\n", "f") == "b\n"
    for hunk in (" x\n+c\n", "+c\n"):
        with pytest.raises(AssertionError, match="times in f"):
            changed("a\nb\n", hunk, "f")
