"""Pages that are followed word by word: their blocks are carried out in a copy of the repository.

A block under a paragraph that ends with the name of a file is the whole new file, or a change to one that exists.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"`([\w./]+)`[^`\n]*:\n\n```(python|diff)\n(.*?)^```$", re.M | re.S)


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def commands(page: str) -> list[list[str]]:
    """The commands of each block under "Check it"."""
    section = read(page).split("## Check it\n")[1].split("\n## ")[0]
    return [text.splitlines() for text in re.findall(r"^```text\n(.*?)^```$", section, re.M | re.S)]


def carry_out(page: str, tree: Path) -> None:
    """Makes the page's files, and its changes to existing ones."""
    for file, language, text in BLOCK.findall(read(page)):
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


def run(command: str, tree: Path, name: str) -> str:
    """The output of a command of a page in the copy, with `name` for NAME."""
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}: " in (tree / "Makefile").read_text()
        words = ["python", "-m", "docs.write"]
    assert words[0] in ("python", "ruff")
    words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "ruff"]
    words = [name if word == "NAME" else word for word in words]
    verbose = os.environ | {"PYTEST_ADDOPTS": "-vv -p no:cacheprovider"}
    done = subprocess.run(words, cwd=tree, env=verbose, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout
