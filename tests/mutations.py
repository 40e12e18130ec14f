"""Mutation tests: applies each fault of mutations.txt to a copy of the tree, and runs the tests that must detect it.

    python -m tests.mutations [PART OF A NAME ...]      or: make mutations

This prints the test that detected each mutation and its time, then the names of the mutations that survived. The exit
status is 1 if any survived. A mutation is stale unless its text occurs exactly once in its file, it changes the file, and
its tests are there; a stale mutation counts as survived. tests/test_mutations.py names the stale ones.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMIT = 600  # seconds


class Mutation(NamedTuple):
    name: str
    file: str  # in xfresearch/
    old: str  # occurs exactly once in the file
    new: str
    pytest: list[str]  # arguments of pytest


def read(text: str) -> list[Mutation]:
    """Parses mutations. Each has a name, a file, lines that start with '- ' and '+ ', and arguments of pytest."""
    mutations = []
    for entry in text.strip().split("\n\n"):
        if entry.startswith("# "):
            continue
        name, file, *lines, pytest = entry.split("\n")
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        mutations.append(Mutation(name, file, old, new, shlex.split(pytest)))
    return mutations


def listed() -> list[Mutation]:
    """Those of mutations.txt."""
    return read((ROOT / "tests" / "mutations.txt").read_text())


def stale(mutation: Mutation, tree: Path = ROOT) -> str:
    """Why a mutation says nothing about the code in `tree`; '' if it may say something."""
    file = tree / "xfresearch" / mutation.file
    count = file.read_text().count(mutation.old) if file.is_file() else 0
    missing = [path for path in paths(mutation) if not (tree / path).exists()]
    if count != 1:
        return f"its text occurs {count} times in {mutation.file}"
    if mutation.old.split() == mutation.new.split():
        return f"it changes nothing in {mutation.file}"
    return f"there is no {', '.join(missing)}" if missing else "" if paths(mutation) else "it names no test"


def paths(mutation: Mutation) -> list[str]:
    """The files and folders of its tests."""
    return [argument.partition("::")[0] for argument in mutation.pytest if argument.startswith("tests/")]


def copy_of_the_tree(target: Path) -> Path:
    """A copy of this repository at `target`, without what runs and tests leave in it."""
    return shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "shared"))


def survives(mutation: Mutation) -> tuple[str, list[str]]:
    """Why the mutation counts as survived, or '' if a test detected it; and the tests that did."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder) / "tree")
        if why := stale(mutation, tree):
            return f"stale: {why}", []
        file = tree / "xfresearch" / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *mutation.pytest]
        try:
            run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"survived: pytest had not ended after {LIMIT} s", []
    failed = [line.split(" - ")[0] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if run.returncode == 1 else f"survived: pytest exited with {run.returncode}", failed


def main(parts: list[str]) -> int:
    mutations = listed()
    selected = [m for m in mutations if not parts or any(part in m.name for part in parts)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        survivors = [name for name in pool.map(report, selected) if name]
    print(f"{len(survivors)} of {len(selected)} survived", *survivors, sep="\n  ")
    return bool(survivors)


def report(mutation: Mutation) -> str:
    """Prints what happened to a mutation. Returns its name if it survived, otherwise ''."""
    start = time.time()
    reason, failed = survives(mutation)
    lines = [*failed, f"{mutation.name}: {reason or 'detected'}, {time.time() - start:.0f} s"]
    print("\n".join(lines), flush=True)
    return mutation.name if reason else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
