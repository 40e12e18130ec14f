"""Faults that tests have to see: each is put into a copy of the tree, and the tests named beside it run there.

    python -m tests.mutations [PART OF A NAME ...]      or: make mutations

prints how long each took to be found, then the names of those that survived; the exit status says whether any did. A
mutation whose text is no longer in the code is stale, which counts as survival.
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
    file: str  # below xfresearch/
    old: str  # must be in it once
    new: str
    tests: str  # arguments of pytest


MODELS = [
    Mutation(
        "slots' weights are not dropped",
        "kernels/plain_attention.py",
        "weights = jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)",
        "keep = jax.random.bernoulli(key, 1 - rate, weights.shape) | (jnp.arange(weights.shape[-1]) < M)\n"
        "        weights = jnp.where(keep, weights / (1 - rate * (jnp.arange(weights.shape[-1]) >= M)), 0)",
        "tests/models/test_dropout.py",
    ),
    Mutation(
        "scanned layers of a pattern share dropout masks",
        "models/transformer.py",
        "at = ctx.layer(repeat * period + i)",
        "at = ctx.layer(repeat * period)",
        "tests/models/test_dropout.py",
    ),
    Mutation(
        "sublayers share dropout masks",
        "models/block.py",
        "self.dropout, name)",
        'self.dropout, "sublayer")',
        "tests/models/test_dropout.py",
    ),
]
TRAINING = [
    Mutation(
        "microbatches share dropout masks",
        "training/step.py",
        "at = None if key is None else jax.random.fold_in(key, index)",
        "at = key",
        "tests/models/test_dropout.py",
    ),
    Mutation(
        "steps share dropout masks",
        "training/step.py",
        'jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), state["step"])',
        "jax.random.fold_in(jax.random.key(config.seed), 1)",
        "tests/models/test_dropout.py",
    ),
]
MUTATIONS = MODELS + TRAINING


def survives(mutation: Mutation) -> str:
    """Why the mutation counts as survived, '' where a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in ("xfresearch", "configs", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        file = tree / "xfresearch" / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            return f"stale: its text is {text.count(mutation.old)} times in {mutation.file}"
        file.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        run = subprocess.run([*command, *mutation.tests.split()], cwd=tree, capture_output=True, text=True)
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(*failed, sep="\n")
        return "" if run.returncode == 1 else f"pytest ends with {run.returncode}"


def main(parts: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not parts or any(part in m.name for part in parts)]
    survivors = []
    for mutation in chosen:
        start = time.time()
        why = survives(mutation)
        print(f"{mutation.name}: {why or 'found'}, {time.time() - start:.0f} s", flush=True)
        survivors += [mutation.name] if why else []
    print(f"{len(survivors)} of {len(chosen)} survived:", *survivors, sep="\n  ")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
