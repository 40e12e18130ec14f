"""Faults that tests have to see (mutations.txt): each is put into a copy of the tree, where the tests under its name run.

    python -m tests.mutations [PART OF A NAME ...]      or: make mutations

prints by which test each was found and how long that took, then the names of those that survived; the exit status says
whether any did. A mutation whose text is not in its file once is stale, and counts as one that survived.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutation(NamedTuple):
    name: str
    file: str  # in xfresearch/
    old: str  # in it once
    new: str
    pytest: list[str]  # its arguments


def read(text: str) -> list[Mutation]:
    """The mutations of a text: of each its name, its file, lines after '- ' and '+ ', and arguments of pytest."""
    found = []
    for entry in text.strip().split("\n\n"):
        if entry.startswith("# "):
            continue
        name, file, *lines, pytest = entry.split("\n")
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        found.append(Mutation(name, file, old, new, pytest.split()))
    return found


def survives(mutation: Mutation) -> str:
    """Why a mutation counts as one that survived, '' where a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "shared"))
        file = tree / "xfresearch" / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            return f"stale: its text is {text.count(mutation.old)} times in {mutation.file}"
        file.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *mutation.pytest]
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    failed = [line.split(" - ")[0] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(*failed, sep="\n")
    return "" if run.returncode == 1 else f"pytest ends with {run.returncode}"


def main(parts: list[str]) -> int:
    every = read((ROOT / "tests" / "mutations.txt").read_text())
    chosen = [m for m in every if not parts or any(part in m.name for part in parts)]
    survivors = []
    for mutation in chosen:
        start = time.time()
        why = survives(mutation)
        print(f"{mutation.name}: {why or 'found'}, {time.time() - start:.0f} s", flush=True)
        survivors += [mutation.name] if why else []
    print(f"{len(survivors)} of {len(chosen)} survived", *survivors, sep="\n  ")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
