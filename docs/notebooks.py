"""python -m docs.notebooks [NAME ...]: executes notebooks of docs/notebooks and keeps their outputs, without metadata.

It needs requirements/notebook.txt. Two of them need a model, stories260K, which is data of the tests, or else downloaded.
tests/test_notebooks.py looks at what is kept, and executes them in `make long`.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent / "notebooks"
ROOT = FOLDER.parent.parent
MOST_CELLS, MOST_OUTPUT = 40, 50_000  # cells of a notebook, and characters of its outputs
WIDGET = "application/vnd.jupyter.widget-view+json"
STORIES = ROOT.parent / "shared" / "data" / "stories260K"


def execute(file: Path, directory: Path, timeout: int = 600) -> dict:
    """The notebook with its outputs, executed in `directory` by this Python. Raises nbclient's CellExecutionError if a cell
    fails, and CellTimeoutError if one takes longer than `timeout` seconds."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    where = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where).execute()
    return tidied(notebook)


def tidied(notebook: dict) -> dict:
    """The notebook without progress bars and times of execution, and with numbered cells."""
    for number, cell in enumerate(notebook["cells"]):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["outputs"] = [_tidied(each) for each in cell["outputs"] if not _is_progress(each)]
    notebook["metadata"] = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def _is_progress(output: dict) -> bool:
    """Whether an output is a progress bar: lines on standard error, or a widget where ipywidgets is installed."""
    return output.get("name") == "stderr" or WIDGET in output.get("data", ())


def _tidied(output: dict) -> dict:
    output = {name: value for name, value in output.items() if name not in ("execution_count", "metadata")}
    if output["output_type"] in ("execute_result", "display_data"):
        output["metadata"] = {}
        data = {kind: value for kind, value in output["data"].items() if kind in ("text/plain", "image/png", "text/html")}
        if "image/png" in data:
            data.pop("text/plain", None)
        output["data"] = data
    if output["output_type"] == "execute_result":
        output["execution_count"] = None
    return output


def write(file: Path, notebook: dict) -> None:
    """As a file whose lines are those of the cells, so that changes can be read."""
    for cell in notebook["cells"]:
        cell["source"] = _lines(cell["source"])
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = _lines(output["text"])
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def _lines(text: str | list[str]) -> list[str]:
    return "".join(text).splitlines(keepends=True)


def prepare(directory: Path) -> None:
    """Gives the notebooks the model that they would download."""
    if STORIES.exists() and not (directory / "stories260K").exists():
        (directory / "stories260K").symlink_to(STORIES)


def main(names: list[str]) -> None:
    for file in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as directory:
            prepare(Path(directory))
            began, before = time.perf_counter(), _processor_seconds()
            write(file, execute(file, Path(directory)))
            used = _processor_seconds() - before
            print(f"{file.name}: {time.perf_counter() - began:.0f} s, {used:.0f} of a processor", flush=True)


def _processor_seconds() -> float:
    """Of the kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
