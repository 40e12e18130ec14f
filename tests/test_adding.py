"""docs/adding.md and the pages adding_*.md, carried out in a copy of the repository: the examples are added, and the
commands pass there."""

import re
import shutil
from pathlib import Path

import pytest

from tests import adding
from tests.mutations import copy_of_the_tree

# The contracts that `-k NAME` must reach without `-m long`. A variant without new parameters has fewer.
CONTRACTS = {
    "mean_abs": {"counts", "reference", "rooms"},
    "moving_average": {
        *("conversions", "counts", "equalities", "gradients", "kernels"),
        *("lowering", "options", "reference", "rooms", "writes"),
    },
    "layer_scale": {"conversions", "counts", "reference", "rooms"},
}
NAMES = " or ".join(CONTRACTS)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = copy_of_the_tree(tmp_path_factory.mktemp("adding") / "tree")
    adding.carry_out("adding.md", tree)
    return tree


@pytest.mark.long
def test_the_examples_pass_the_checks_of_the_page(tree):
    outputs = [adding.run(command, tree, NAMES) for command in adding.commands("adding.md")[0]]
    passed = re.findall(r"^tests/contracts/test_(\w+).py::\w+\[(\S+)\] PASSED", "\n".join(outputs), re.M)
    for name, contracts in CONTRACTS.items():
        assert {contract for contract, case in passed if name in case} == contracts
    assert "`'moving_average'`" in (tree / "docs" / "data" / "tables" / "keys.md").read_text()


@pytest.mark.long
def test_the_examples_pass_the_tests_that_take_long(tree):
    """With few updates, and of `make test` only the tests that read the pages. The other test may have another tree, so the
    pages are made here, too."""
    *rest, last = adding.commands("adding.md")[1]
    assert last == "make test"
    for command in ["make docs", *rest, "python -m pytest tests/test_docs.py -k 'generated or table'"]:
        adding.run(command, tree, NAMES)


def followed(page: str, folder, name: str) -> tuple[Path, list[str]]:
    """A copy of the repository in which a page was carried out, and the outputs of its commands, with `name` for NAME."""
    tree = copy_of_the_tree(folder / "tree")
    adding.carry_out(page, tree)
    return tree, [adding.run(command, tree, name) for block in adding.commands(page) for command in block]


@pytest.mark.long
def test_a_data_format_is_added_by_its_page(tmp_path):
    tree, outputs = followed("adding_format.md", tmp_path, "sqlite")
    assert len(re.findall(r"\[sqlite.*\] PASSED", outputs[2])) == 3
    assert "streams (`datasets`)" in (page := (tree / "docs" / "data.md").read_text()) and "SQLite" in page


@pytest.mark.long
def test_an_analysis_is_added_by_its_page(tmp_path):
    tree, outputs = followed("adding_analysis.md", tmp_path, "written_share")
    assert len(re.findall(r"test_the_share_of_every_mixer\[.*\] PASSED", outputs[2])) == 3
    assert re.search(r"test_a_room_gives_a_result.*\bwritten_share\] PASSED", outputs[4])
    assert "| `written_share` | how large the outputs" in (tree / "docs" / "anatomy.md").read_text()


@pytest.mark.long
def test_an_optimiser_and_an_objective_are_added_by_their_page(tmp_path):
    _, outputs = followed("adding_training.md", tmp_path, str(tmp_path / "run"))
    assert "test_update_rules_against_their_equations[_amsgrad] PASSED" in outputs[2]


@pytest.mark.parametrize("page", ["adding.md", "adding_analysis.md", "adding_format.md", "adding_training.md"])
def test_the_blocks_of_a_page_fit(page, tmp_path):
    for file, _, _ in adding.BLOCK.findall(adding.read(page)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if (adding.ROOT / file).exists():
            shutil.copy(adding.ROOT / file, tmp_path / file)
    adding.carry_out(page, tmp_path)


@pytest.mark.parametrize(("example", "most"), {"a norm": 2, "a mixer": 3, "a connection": 3}.items())
def test_a_variant_is_its_code_a_line_of_a_table_and_a_case(example, most):
    text = adding.read("adding.md").split(f"## Example: {example}\n")[1].split("\n## ")[0]
    files = {file for file, _, _ in adding.BLOCK.findall(text)}
    assert len(files) <= most and any(file.startswith("tests/variants/") for file in files)


def test_a_block_that_does_not_fit_is_an_error():
    assert adding.changed("a\nb\n", " a\n+c\n", "f") == "a\nc\nb\n"
    assert adding.changed("a\nb\n", "-a\n", "f") == "b\n"
    for hunk in (" x\n+c\n", "+c\n"):
        with pytest.raises(AssertionError, match="times in f"):
            adding.changed("a\nb\n", hunk, "f")
