"""The notebooks of docs/notebooks: what is kept of them, and in `make long` that they run."""

import json
import re
from pathlib import Path

import pytest

from docs import notebooks

FILES = sorted(notebooks.FOLDER.glob("*.ipynb"))
INSTALL = re.compile(r'find_spec\("xfresearch"\) is None:  # in Colab\n    %pip install ')


def cells(file: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_kept_is_small_and_whole(file):
    notebook, code = json.loads(file.read_text()), cells(file, "code")
    assert notebook == notebooks.tidied(json.loads(file.read_text())), "python -m docs.notebooks writes it"
    assert len(notebook["cells"]) <= notebooks.MOST_CELLS
    assert INSTALL.search("".join(code[0]["source"])), "the first cell installs the package in Colab"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    assert len(json.dumps(outputs)) < notebooks.MOST_OUTPUT


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_links_lead_to_pages_and_to_colab(file):
    text = "".join("".join(cell["source"]) for cell in cells(file, "markdown"))
    assert f"/blob/main/docs/notebooks/{file.name})" in text
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links and [link for link in links if not (file.parent / link).exists()] == []


def test_progress_bars_are_not_kept():
    """Also those of ipywidgets, which a run keeps only where it is installed."""
    bar = {"output_type": "display_data", "metadata": {}, "data": {notebooks.WIDGET: {}, "text/plain": "step 0/200"}}
    line = {"output_type": "stream", "name": "stderr", "text": "step 1/200"}
    printed = {"output_type": "stream", "name": "stdout", "text": "2.27"}
    cell = {"cell_type": "code", "source": "", "outputs": [bar, line, printed]}
    assert notebooks.tidied({"cells": [cell]})["cells"][0]["outputs"] == [printed]


@pytest.mark.long
@pytest.mark.parametrize("raised, stack", [("UserError", False), ("RuntimeError", True)])
def test_a_users_mistake_is_one_line_and_a_bug_keeps_its_stack_trace(raised, stack):
    nbformat = pytest.importorskip("nbformat", reason="needs requirements/notebook.txt")
    nbclient = pytest.importorskip("nbclient", reason="needs requirements/notebook.txt")
    code = f"try:\n    {{}}['a']\nexcept KeyError:\n    raise {raised}('no a')"
    cell = nbformat.v4.new_code_cell(f"from xfresearch.runtime.errors import UserError\n{code}")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, allow_errors=True).execute()
    (shown,) = notebook.cells[0].outputs
    text = "\n".join(shown["traceback"])
    assert "no a" in text and ("KeyError" in text) == stack


@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs(file, tmp_path):
    pytest.importorskip("nbclient", reason="needs requirements/notebook.txt")
    notebooks.prepare(tmp_path)
    if "stories260K" in file.read_text() and not (tmp_path / "stories260K").exists():
        pytest.skip(f"{notebooks.STORIES} is not here")
    now = notebooks.execute(file, tmp_path)
    assert kinds(now) == kinds(json.loads(file.read_text())), "python -m docs.notebooks keeps the new outputs"


def kinds(notebook: dict) -> list[list[str]]:
    """The kinds of outputs of each cell."""
    return [[output["output_type"] for output in cell.get("outputs", [])] for cell in notebook["cells"]]
