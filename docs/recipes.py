"""Draws the pictures of docs/recipes.md with the model in runs/quickstart: python -m docs.recipes."""

import re
import runpy
import shutil
import tempfile
from pathlib import Path

from xfresearch.runtime.command import run
from xfresearch.runtime.errors import UserError

HERE = Path(__file__).parent
RUN = Path("runs/quickstart")


def main(arguments) -> None:
    if not (RUN / "checkpoints").exists():
        raise UserError(f"{RUN} has no model: `make train` makes it")
    import matplotlib

    matplotlib.use("Agg")
    (HERE / "recipes").mkdir(exist_ok=True)
    page = (HERE / "recipes.md").read_text()
    with tempfile.TemporaryDirectory() as directory:
        for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)):
            file = Path(directory) / f"recipe{number}.py"
            file.write_text(snippet)
            runpy.run_path(str(file))
            (picture,) = re.findall(r'savefig\("runs/(\w+\.png)"', snippet)
            shutil.move(RUN.parent / picture, HERE / "recipes" / picture)
            print(HERE / "recipes" / picture)


if __name__ == "__main__":
    run(main)
